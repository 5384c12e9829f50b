"""A knob that a plugin brings to the space of an engine: its values, what each does, and how it is switched on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Source

WHOLE_STEP = "step"
"""The part of a step's time that an effect is of, where it is of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What a figure is multiplied by, with the ends of an 80% interval."""

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginChoice:
    """One value of a knob other than the one that is off.

    `settings` are those of the engine that predict it, where the core has formulas. `time` scales `part`, a part of a
    step as in `Prediction.time_s` or WHOLE_STEP; `memory` scales the peak of what is allocated. `flags` and
    `environment` switch it on: flags on the user's own launch command. Both empty: nobody published how.
    """

    value: KnobValue
    settings: Mapping[str, KnobValue | float] = field(default_factory=dict)
    part: str = WHOLE_STEP
    time: Factor = Factor()
    memory: Factor = Factor()
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def launches(self, *, own_command: bool) -> bool:
        """Return whether trials can have it: variables reach all of them, flags the user's own command."""
        return own_command if self.flags else bool(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A knob of the engine that another one stands on: at least or at most so much, or one of some values."""

    knob: str
    at_least: int | None = None
    at_most: int | None = None
    one_of: tuple[KnobValue, ...] = ()

    def __str__(self) -> str:
        least = f">= {self.at_least}" if self.at_least is not None else ""
        most = f"<= {self.at_most}" if self.at_most is not None else ""
        words = " or ".join("not set" if each is None else str(each).lower() for each in self.one_of)
        return f"{self.knob} {least or most or words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKnob:
    """A knob of one engine on one kind of chip. `name` is a key of a spec's space that the core does not have.

    `says` tells what it is, `claim` what its source says it gains, and `effect` where the factors of its choices are
    from: mostly an estimate with its reasoning; None where they are those of the source. `needs` must hold where it is
    on; `of_experts` says that only a mixture of experts has it.
    """

    name: str
    off: KnobValue
    choices: tuple[PluginChoice, ...]
    message: str
    source: Source
    claim: str = ""
    effect: Source | None = None
    needs: tuple[Need, ...] = ()
    of_experts: bool = False

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """All values, the one that is off first."""
        return (self.off, *(choice.value for choice in self.choices))

    def launched(self, *, own_command: bool) -> tuple[KnobValue, ...]:
        """Return the values that trials can have, with the user's own command or without."""
        return (self.off, *(choice.value for choice in self.choices if choice.launches(own_command=own_command)))

    def choice(self, value: KnobValue) -> PluginChoice | None:
        """Return the choice of a value; None for the one that is off."""
        return next((each for each in self.choices if _same(each.value, value)), None)

    def knows(self, value: KnobValue) -> bool:
        """Return whether `value` is one of its values: true is not 1."""
        return any(_same(each, value) for each in self.values)

    def why_not(self, choice: PluginChoice, *, own_command: bool) -> str:
        """Return why trials cannot have a choice, with the user's own command or without; nothing if they can."""
        if choice.launches(own_command=own_command):
            return ""
        if choice.flags:
            return f"{' '.join(choice.flags)} goes on a launch command: give a train.command"
        return "nobody has published how it is switched on"


def _same(one: KnobValue, other: KnobValue) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
