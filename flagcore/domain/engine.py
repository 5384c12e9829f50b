"""Whether and how an engine runs on a chip, and which values of knobs and settings work on the chip."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flagcore.domain.chip import Device, Source, Support
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import KnobValue
from flagcore.i18n import N_, _


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedValues:
    """Values that do not work on a chip. They become a legality rule with the name `name`.

    `knob`: the name of a knob; `precision`, `attention`, `implementation` or `quant_method` of the job; or a setting
    that all candidates share, as `settings.NAME` of training or `engine_args.NAME` of a server.
    `above`: numbers greater than this do not work either. None if there is no such bound.
    """

    name: str
    knob: str
    values: tuple[KnobValue, ...] = ()
    reason: str
    above: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedSetting:
    """The only value of a shared setting that works on a chip.

    Trials use it if the spec does not set it. Other values break a legality rule with the name `name`.

    `setting`: `settings.NAME` of a training command, or `engine_args.NAME` of a server.
    """

    name: str
    setting: str
    value: KnobValue
    reason: str


JOB_KEYS = ("precision", "attention", "implementation", "quant_method")
"""Keys of a job whose values a plugin may reject."""
SHARED_PREFIXES = ("settings.", "engine_args.")
"""The prefixes of settings that all candidates share."""
ValueRule = RefusedValues | ForcedSetting
"""A legality rule that plugins state as data. Candidates that break it are not legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredSetting:
    """A value that a shared setting gets if the user does not set it, with the reason. Other values also work.

    `setting`: as in `ForcedSetting`. If a knob has the same name, `auto` in a space means this value.
    """

    setting: str
    value: KnobValue
    reason: str


UNKNOWN = N_("its effect is not known to flagcore")
"""The effect of a setting that is in no class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmodelled:
    """A flag, variable or key of a job that changes its time or memory, and that predictions do not include.

    `name`: the setting as users write it.
    `why`: what it changes, in which direction, and by how much if a source gives a size, as a phrase. Empty if it
    changes nothing in the job.
    `time`: the bounds of the factor by which it may change step times. They widen the 80% intervals.
    """

    name: str
    why: str
    time: tuple[float, float] = (1.0, 1.0)

    def __str__(self) -> str:
        return _("{name} is not predicted: {why}", name=self.name, why=_(self.why))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAdvice:
    """A plugin's advice about a task.

    `rules`: the values that do not work on the chips. Candidates with such values are not legal.
    `impossible`: the reason why no candidate of the task can run. Empty if some can.
    `preferred`: values for settings that the task does not set.
    `warmup`: the number of first training steps, or first requests of a load, that are not measured. They are slow
    because kernels are compiled.
    `failures`: patterns of log lines that show failures. Patterns for out of memory are tried first, then the plugins'
    other patterns in order, then the engine's patterns. The first pattern that matches a line determines the failure.
    `notes`: sentences for the user.
    `unmodelled`: settings of the vendor's software that change the cost of the task.
    `harmless`: environment variables of the task that do not, or whose effect predictions include.
    """

    rules: tuple[ValueRule, ...] = ()
    impossible: str = ""
    preferred: tuple[PreferredSetting, ...] = ()
    warmup: int = 0
    failures: tuple[FailurePattern, ...] = ()
    notes: tuple[str, ...] = ()
    unmodelled: tuple[Unmodelled, ...] = ()
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResource:
    """The name under which a scheduler lends a vendor's devices, and whether its unit is a device or a card.

    `chips`: other names, by a pattern of chips. `rdma`: the usual resource of adapters for RDMA, which notes name.
    """

    name: str
    source: Source
    chips: Mapping[str, str] = field(default_factory=dict)
    counts: Literal["devices", "cards"] = "devices"
    rdma: "DeviceResource | None" = None


DEVICE = "{device}"
"""Placeholder for the name of a device in the fields of a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDevices:
    """What a container needs to use a vendor's devices.

    `service`: fields of a service of the Compose Specification. An item of a list with DEVICE stands for an item for
    each device; without such items, the container sees all devices.
    `images`: published images with engines, by the engine's name or by that and a pattern of chips (`ENGINE PATTERN`).
    """

    service: Mapping[str, Any]
    source: Source
    images: Mapping[str, str] = field(default_factory=dict)

    @property
    def selects(self) -> bool:
        """Whether the container sees only its own devices, which are numbered from 0 in it."""
        return DEVICE in str(self.service)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What production jobs use on a chip: the implementation of the layers, and settings.

    `settings` are those that differ from the engine's published recipes. False and None mean that jobs do not use one.
    """

    implementation: str
    source: Source
    settings: Mapping[str, KnobValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """Whether and how an engine runs on a chip.

    `device_type`: the name of the device in torch. Without it, candidates can be predicted but not run.
    `distributed_backend`: the name of the device's backend in torch.distributed. It is also needed to run candidates.
    `preload`: modules to import before the first tensor is created.
    `shared_devices`: whether several processes may use one device, and devices use the memory of the machine, as on a
    CPU.
    `visible_devices`: the environment variables that select devices by comma-separated names. The vendor's variable
    comes first, then equivalent variables of other software.
    `outer_variable`: a variable of a lower software layer that selects devices first. The names in `visible_devices`
    refer to that selection. Empty if there is none.
    `stack`: the layers and settings of production jobs on the chip, which plans assume. None if not documented.
    `cross_vendor_libraries`: the collective libraries that connect the chip with chips of other vendors. Without a
    common library, messages between vendors go through the memory of the hosts.
    `kubernetes`, `slurm`: the resource that a pod or a batch job requests. None if it is not documented.
    `container`: what a container needs. None if it is not documented.
    `overheads`: overheads of a server that differ on the chip, by name.
    `install`: where to get the chip's build of the engine. Empty for the public build.
    `notes`: sentences for the user.
    """

    support: Support
    reason: str = ""
    device_type: str | None = None
    distributed_backend: str | None = None
    preload: tuple[str, ...] = ()
    shared_devices: bool = False
    visible_devices: tuple[str, ...] = ()
    outer_variable: str = ""
    stack: Stack | None = None
    cross_vendor_libraries: tuple[str, ...] = ()
    kubernetes: DeviceResource | None = None
    slurm: DeviceResource | None = None
    container: ContainerDevices | None = None
    overheads: Mapping[str, object] = field(default_factory=dict)
    install: str = ""
    notes: tuple[str, ...] = ()


def device_variables(support: EngineSupport, devices: Sequence[Device]) -> dict[str, str]:
    """Return the environment variables that select exactly `devices`, all on one host.

    Returns an empty dict if the chip has no such variables.
    """
    variables = dict.fromkeys(support.visible_devices, ",".join(device.selector for device in devices))
    if devices and devices[0].within:
        variables[support.outer_variable] = devices[0].within
    return variables


def without_devices(support: EngineSupport, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` without those that select devices, for a host or pod that assigns devices itself."""
    selecting_variables = {*support.visible_devices, support.outer_variable}
    return {name: value for name, value in variables.items() if name not in selecting_variables}


def has_common_library(groups: Sequence[NodeGroup], supports: Sequence[EngineSupport]) -> bool:
    """Return whether at least one collective library supports the devices of all node groups.

    `supports`: the engine support on each group's chip, in the order of `groups`.
    """
    is_one_vendor = len({group.chip.vendor.casefold() for group in groups}) == 1
    return is_one_vendor or bool(set.intersection(*(set(each.cross_vendor_libraries) for each in supports)))
