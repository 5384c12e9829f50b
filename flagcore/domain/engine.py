"""How well an engine runs on a chip, and what it needs there."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Support


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Values of one knob that do not work on a chip, and why. They become a legality rule of that name."""

    name: str
    knob: str
    values: tuple[KnobValue, ...]
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
    notes: tuple[str, ...] = ()
