"""How well an engine runs on a chip, and what it needs there."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Support


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Values that do not work on a chip, and why. They become a legality rule of that name.

    `knob` is a knob, `precision`, `attention` or `implementation` of the job, or a setting that all candidates share:
    `settings.NAME` of training, `engine_args.NAME` of a server. Of a knob that counts, what is `above` is refused, too.
    """

    name: str
    knob: str
    values: tuple[KnobValue, ...]
    reason: str
    above: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """The one value of a shared setting that works on a chip, and why.

    It is given to trials where the user says nothing of it; another value is refused by a rule of that name. `setting`
    is `settings.NAME` of a training command, or `engine_args.NAME` of a server.
    """

    name: str
    setting: str
    value: KnobValue
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """What a plugin says about one engine on one of its chips.

    `device_type` is torch's name of the device, `distributed_backend` torch.distributed's name of the
    collectives, `preload` the modules to import before the first tensor. `shared_devices`
    says that processes may outnumber devices and live in the machine's own memory, as on a plain CPU.
    Without a device type and a backend nothing can be run, only predicted. `visible_devices` is the environment
    variable that tells a process which devices it may use, by their numbers with commas; None where there is none.
    `notes` are sentences that a user should read: what no rule can say.
    """

    support: Support
    reason: str = ""
    device_type: str | None = None
    distributed_backend: str | None = None
    preload: tuple[str, ...] = ()
    shared_devices: bool = False
    visible_devices: str | None = None
    refused: tuple[Refused, ...] = ()
    forced: tuple[Forced, ...] = ()
    notes: tuple[str, ...] = ()
