"""The support for an engine on a chip."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flagcore.domain.chip import Device, Source, Support
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.space import KnobValue


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedValues:
    """Values that do not work on a chip. They become a legality rule with the name `name`.

    `knob` is a knob, `precision`, `attention` or `implementation` of the job, or a setting that all candidates share:
    `settings.NAME` of training, `engine_args.NAME` of a server. Numbers greater than `above` do not work either.
    """

    name: str
    knob: str
    values: tuple[KnobValue, ...]
    reason: str
    above: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedSetting:
    """The only value of a shared setting that works on a chip.

    Trials use it if the spec does not have the setting. Other values break a legality rule with the name `name`.
    `setting` is `settings.NAME` of a training command, or `engine_args.NAME` of a server.
    """

    name: str
    setting: str
    value: KnobValue
    reason: str


ValueRule = RefusedValues | ForcedSetting
"""A rule that plugins state as data. Candidates that break it are not legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferredSetting:
    """A value of a shared setting that trials get if the user does not set it, with the reason. Other values work, too.

    `setting` is that of `ForcedSetting`. If a knob has the same name, `auto` in a space means this value.
    """

    setting: str
    value: KnobValue
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAdvice:
    """A plugin's answer about a whole task.

    `impossible` says why no candidate of it can run; empty: some can. `preferred` are settings that the task lacks.
    `warmup` is the number of first training steps that are too slow to count, because kernels are compiled, or of first
    requests of a load. `notes` are sentences for the user.
    """

    impossible: str = ""
    preferred: tuple[PreferredSetting, ...] = ()
    warmup: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesResource:
    """The resource name of a vendor's Kubernetes device plugin, and whether it counts devices or cards."""

    name: str
    source: Source
    counts: Literal["devices", "cards"] = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """Whether and how an engine runs on a chip.

    `device_type` is the name of the device in torch, `distributed_backend` the name of its backend in
    torch.distributed; without them, candidates can be predicted but not run. `preload` are modules to import before the
    first tensor. With `shared_devices`, several processes may use one device and the memory of the machine, as on a
    CPU. `visible_devices` are the environment variables that select devices by comma-separated names: the vendor's,
    then those that mean the same to other software. `outer_variable` is that of a lower layer, within whose devices the
    names count; empty if there is none. `implementation` is the engine's implementation that production uses on the
    chip, which plans assume; empty if undocumented. `cross_vendor_libraries` are the collective libraries that connect
    the chip with those of other vendors; messages between vendors without a common one go through the memory of the
    hosts. `kubernetes` is the resource that a pod requests; None if undocumented. `install` states where the chip's
    build of the engine comes from; empty for the public one. `notes` are sentences for the user.
    """

    support: Support
    reason: str = ""
    device_type: str | None = None
    distributed_backend: str | None = None
    preload: tuple[str, ...] = ()
    shared_devices: bool = False
    visible_devices: tuple[str, ...] = ()
    outer_variable: str = ""
    implementation: str = ""
    cross_vendor_libraries: tuple[str, ...] = ()
    kubernetes: KubernetesResource | None = None
    install: str = ""
    notes: tuple[str, ...] = ()


def device_variables(support: EngineSupport, devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables of a process that select exactly `devices` of one host; empty if none select devices."""
    variables = dict.fromkeys(support.visible_devices, ",".join(device.selector for device in devices))
    if devices and devices[0].within:
        variables[support.outer_variable] = devices[0].within
    return variables


def without_devices(support: EngineSupport, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` without those that select devices, for a place that assigns devices itself."""
    own = {*support.visible_devices, support.outer_variable}
    return {name: value for name, value in variables.items() if name not in own}


def has_common_library(groups: Sequence[NodeGroup], supports: Sequence[EngineSupport]) -> bool:
    """Return whether one collective library connects the devices of all node groups. `supports` has one per group."""
    is_one_vendor = len({group.chip.vendor.casefold() for group in groups}) == 1
    return is_one_vendor or bool(set.intersection(*(set(each.cross_vendor_libraries) for each in supports)))
