"""Support for an engine on a chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Source, Support


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Values that do not work on a chip, with the reason. They become a legality rule of that name.

    `knob` is a knob, `precision`, `attention` or `implementation` of the job, or a setting that all candidates share:
    `settings.NAME` of training, `engine_args.NAME` of a server. Numbers greater than `above` are refused, too.
    """

    name: str
    knob: str
    values: tuple[KnobValue, ...]
    reason: str
    above: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """The only value of a shared setting that works on a chip, with the reason.

    Trials get it if the user does not set it; another value is refused by a rule of that name. `setting`
    is `settings.NAME` of a training command, or `engine_args.NAME` of a server.
    """

    name: str
    setting: str
    value: KnobValue
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """A value of a shared setting that trials get if the user does not set it, with the reason. Others work, too.

    `setting` is that of `Forced`.
    """

    setting: str
    value: KnobValue
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAdvice:
    """A plugin's answer about a whole task.

    `impossible` says why no candidate of it can run; empty: some can. `refused`, `forced` and `preferred` hold for this
    task, beyond those of the engine. `notes` are sentences for the user.
    """

    impossible: str = ""
    refused: tuple[Refused, ...] = ()
    forced: tuple[Forced, ...] = ()
    preferred: tuple[Preferred, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesResource:
    """The name under which a vendor's device plugin for Kubernetes offers devices, and what it counts."""

    name: str
    source: Source
    counts: Literal["devices", "cards"] = "devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """A plugin's answer about one engine on one of its chips.

    `device_type` is torch's name of the device, `distributed_backend` torch.distributed's name of the
    collectives, `preload` the modules to import before the first tensor. `shared_devices`
    means that processes may outnumber devices and use the machine's own memory, as on a CPU.
    Without a device type and a backend, candidates are predicted but not run. `visible_devices` is the environment
    variable with the comma-separated numbers of the devices that a process may use; None if there is none.
    `implementation` is what production runs on the chip, in the engine's words, and plans assume; empty: no source says
    it. `kubernetes` is what a pod asks for; None if no source says it. `install` states where the chip's build of the
    engine comes from; empty: the public one. `notes` are sentences for the user.
    """

    support: Support
    reason: str = ""
    device_type: str | None = None
    distributed_backend: str | None = None
    preload: tuple[str, ...] = ()
    shared_devices: bool = False
    visible_devices: str | None = None
    implementation: str = ""
    kubernetes: KubernetesResource | None = None
    install: str = ""
    refused: tuple[Refused, ...] = ()
    forced: tuple[Forced, ...] = ()
    notes: tuple[str, ...] = ()
