"""A knob: one tunable option of an engine, or one that a vendor's plugin adds to an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Source

if TYPE_CHECKING:
    from flagcore.domain.spec import Task

Kind = Literal["int", "flag", "word", "share", "words"]
"""A whole number; true or false; one word of a list; a number above 0, at most 1; several words of a list."""

WHOLE_STEP = "step"
"""The part of a step that an effect applies to if it applies to the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A multiplier with the ends of its 80% interval."""

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one value of a knob changes, as data.

    `settings` are engine settings that predict it. `time` scales `part`, a part of a step as in `Prediction.time_s`, or
    WHOLE_STEP; `memory` scales the peak of allocated memory. `flags` are added to the launch command, `environment` to
    the variables of a trial. If both are empty, a trial cannot use the value.
    """

    settings: Mapping[str, KnobValue | float] = field(default_factory=dict)
    part: str = WHOLE_STEP
    time: Factor = Factor()
    memory: Factor = Factor()
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition on another knob: a minimum, a maximum, or one of some values."""

    knob: str
    at_least: int | None = None
    at_most: int | None = None
    one_of: tuple[KnobValue, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How the engine's command line spells a knob, without leading dashes.

    `off` is the spelling that means False, if the engine has one. `versions` is a PEP 440 specifier of the engine
    releases that accept the spelling; empty means all.
    """

    name: str = ""
    off: str = ""
    versions: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One option of an engine: what it is, which values it takes, and how it is set.

    A knob that `searchable` is False for is a setting: it has one value for all candidates of a run.
    """

    name: str
    help: str
    """One sentence for the schema, the reference and the report."""
    label: str = ""
    """Short name in tables and on the command line, such as TP; empty: `name`."""
    kind: Kind = "int"
    words: tuple[str, ...] = ()
    """The values of a knob of kind word or words."""
    minimum: int = 1
    maximum: int | None = None
    neutral: KnobValue = None
    """The value with which the engine runs if the knob is not set."""
    auto: Callable[[Task], Sequence[KnobValue]] | None = None
    """Returns the values that `auto` stands for; None: the knob has no `auto`."""
    auto_help: str = ""
    """What `auto` stands for, as a phrase: every divisor of the number of devices."""
    searchable: bool = True
    memory_order: int = 0
    """+1 if a larger value needs at least as much memory, -1 if a smaller one does, 0 if nothing is known."""
    time_order: int = 0
    """The same for the time of a step."""
    flags: tuple[Flag, ...] = ()
    """The preferred spelling first; empty: not a flag of the engine."""
    aliases: tuple[str, ...] = ()
    """Other names that specs and job records use."""
    versions: str = ""
    """PEP 440 specifier of the engine releases that have the knob; empty: all."""
    effects: Mapping[KnobValue, Effect] = field(default_factory=dict)
    """What each value other than `neutral` changes, if data can say it."""
    requires: tuple[Requirement, ...] = ()
    """What must hold where the knob is not neutral."""
    experts_only: bool = False
    """Whether only mixture-of-experts models have the knob."""
    source: Source | None = None
    """Where the knob is documented; plugins must give it."""
    claim: str = ""
    """What the source claims the knob gains."""
    effect_source: Source | None = None
    """Where the factors of `effects` come from; None: from `source`."""
