"""A knob: one tunable option of an engine, or one that a vendor's plugin adds to an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Source
from flagcore.domain.space import Axis
from flagcore.errors import SpecError

if TYPE_CHECKING:
    from flagcore.domain.spec import Task

Kind = Literal["int", "flag", "word", "share", "number", "text", "words", "ints"]
"""A whole number; true or false; one of `words`; a number above 0, at most 1; and of settings also a number, any text,
several of `words`, several whole numbers."""

Scope = Literal["space", "record", "setting"]
"""Where a knob may be given: in a space, a baseline and a job record's candidate; in that candidate alone; in a job's
settings, as one value for all candidates, and with `space`, too, as values that a space compares."""

WHOLE_STEP = "step"
"""The part of a step that an effect applies to if it applies to the whole step."""

SHARES = tuple(f"{thousandths / 1000:g}" for thousandths in range(1, 1001))
"""The values of a share as words, so that its code is the same in every task: thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A multiplier with the ends of its 80% interval."""

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.value <= self.high < math.inf:
            raise ValueError(f"a factor must have 0 < low <= value <= high: {self.low}, {self.value}, {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one value of a knob changes, as data.

    `settings` are engine settings that predict it; `passed` says that the engine starts trials with them. `time` scales
    `part`, a part of a step as in `Prediction.time_s`, or WHOLE_STEP; `memory` scales the peak of allocated memory.
    `flags` are added to the user's own launch command, `environment` to the variables of a trial. If both are empty, a
    trial cannot use the value, unless its settings are passed.
    """

    settings: Mapping[str, KnobValue | float] = field(default_factory=dict)
    passed: bool = False
    part: str = WHOLE_STEP
    time: Factor = Factor()
    memory: Factor = Factor()
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def no_launch_reason(self, *, own_command: bool) -> str:
        """Return why a trial cannot use the value, with the user's own command or without; empty if it can."""
        if self.passed:
            return ""
        if self.flags:
            return "" if own_command else f"{' '.join(self.flags)} needs a launch command: give train.command"
        return "" if self.environment else "no source documents how to enable it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition on another knob: a minimum, a maximum, or one of some values."""

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
class Flag:
    """How the engine's command line spells a knob, without leading dashes.

    `name` sets a value, or True; `off` is the spelling that means False. Either may be missing. With `word`, `name` is
    a switch that means this one value. `versions` is a PEP 440 specifier of the engine releases that accept the
    spelling; empty means all.
    """

    name: str = ""
    off: str = ""
    word: str = ""
    versions: str = ""

    def sets(self, value: KnobValue | float) -> bool:
        """Return whether the spelling can set `value`."""
        if self.word:
            return value == self.word
        return bool(self.off if value is False else self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One option of an engine: its meaning, its values, and how it is set."""

    name: str
    help: str = ""
    """One sentence for the schema, the reference and the report."""
    label: str = ""
    """Short name in tables and on the command line, such as TP; empty: `name`."""
    part_of: str = ""
    """The flag that this knob details: text has its value behind the flag's, as in recompute full uniform 1."""
    shows_neutral: bool = False
    """Whether text has the neutral value, too."""
    kind: Kind = "int"
    scope: tuple[Scope, ...] = ("space",)
    words: tuple[str, ...] = ()
    """The values of a knob of kind word or words."""
    spellings: Mapping[str, int | str] = field(default_factory=dict)
    """Other spellings of values: words that stand for a number, or old names of words."""
    minimum: float | None = 1
    maximum: float | None = None
    above: float | None = None
    """A bound that a number must exceed, instead of `minimum`."""
    neutral: KnobValue = None
    """The value with which the engine runs if the knob is not set."""
    auto: Callable[..., Sequence[KnobValue]] | None = None
    """Returns the values that `auto` stands for in a task; None: the knob has no `auto`."""
    auto_help: str = ""
    """What `auto` stands for, as a phrase: every divisor of the number of devices."""
    memory_order: int = 0
    """+1 if a larger value needs at least as much memory, -1 if a smaller one does, 0 if nothing is known."""
    flags: tuple[Flag, ...] = ()
    """The preferred spelling first; empty: not a flag of the engine."""
    explicit: bool = False
    """Whether the flag is given for the neutral value, too."""
    aliases: tuple[str, ...] = ()
    """Other names that specs and job records use."""
    opposite: str = ""
    """For a flag: the knob that it is the negation of, which is set in its place."""
    versions: str = ""
    """PEP 440 specifier of the engine releases that have the knob; empty: all."""
    effects: Mapping[KnobValue, Effect] = field(default_factory=dict)
    """What each value changes; plugins leave out `neutral`. If there are any, no other values are valid."""
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

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def title(self) -> str:
        """The label, or else the name."""
        return self.label or self.name

    @property
    def searchable(self) -> bool:
        """Whether every space has the knob."""
        return "space" in self.scope and "setting" not in self.scope

    @property
    def comparable(self) -> bool:
        """Whether it is a setting whose values a space can compare; a space that does not name it has one value."""
        return {"space", "setting"} <= set(self.scope)

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name, then the aliases."""
        return (self.name, *self.aliases)

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """All values, the neutral one first, of a knob with effects; empty for others."""
        return tuple(dict.fromkeys((self.neutral, *self.effects))) if self.effects else ()

    def effect(self, value: KnobValue) -> Effect | None:
        """Return the effect of `value`, or None."""
        return self.effects.get(value)

    def compared(self, values: Sequence[KnobValue]) -> Knob:
        """Return the knob of a setting of which a space compares `values`. The neutral value is one of them."""
        given = [value for value in dict.fromkeys((self.neutral, *values)) if value is not None]
        effects: dict[KnobValue, Effect] = {value: Effect(settings={self.name: value}, passed=True) for value in given}
        return replace(self, effects=effects)

    def available(self, version: str | None) -> bool:
        """Return whether an engine release has the knob. Unknown releases have it."""
        return in_versions(self.versions, version)

    def arguments(self, value: KnobValue | float, version: str | None = None) -> tuple[str, ...]:
        """Return the flags that set `value` in an engine release; none if the engine uses it without them."""
        flag = next((each for each in self.flags if each.sets(value) and in_versions(each.versions, version)), None)
        if flag is None or value is None or (value == self.neutral and not self.explicit):
            return ()
        if isinstance(value, bool) or flag.word:
            return (f"--{flag.off if value is False else flag.name}",)
        values = str(value).split(",") if self.kind in ("words", "ints") else [str(value)]
        return (f"--{flag.name}", *values)

    def named_in(self, mapping: Mapping[str, Any]) -> Any:
        """Return the value of `mapping` under one of the knob's names, or None."""
        return next((mapping[name] for name in self.names if name in mapping), None)

    def parse(self, value: object, key: str) -> KnobValue:
        """Return `value`, as `key` of a spec gives it, as a value of this knob. Raises SpecError."""
        if value is None and (self.neutral is None or not self.effects):
            return self.neutral
        parser = _parse_listed if self.effects else _PARSERS[self.kind]
        found: KnobValue = parser(self, value)
        if found is _INVALID:
            problem, fix = f"is not a valid value of {self.name}", _suggestion(self, value)
            raise SpecError(key=key, value=value, problem=problem, fix=fix)
        return found

    def parse_space(self, task: Task, absent: str | Sequence[KnobValue]) -> tuple[KnobValue, ...]:
        """Return the values that the space of a task lists, those of `auto` resolved. Raises SpecError.

        `absent` is what a space means that does not have the knob: auto, or some values.
        """
        space = task.spec.space
        asked = next((space[name] for name in self.names if name in space), absent)
        if isinstance(asked, str):
            found = self.auto(task) if self.auto else self.values or (self.neutral,)
        else:
            found = [self.parse(each, f"auto_tuner.space.{self.name}") for each in asked]
        return tuple(dict.fromkeys(found))

    def axis(self, values: Sequence[KnobValue], also: Sequence[KnobValue] = ()) -> Axis:
        """Return the axis of some values; `also` are further values that a candidate may have."""
        words = {"share": SHARES, "word": self.words}.get(self.kind, ())
        if self.effects:
            words = tuple(value for value in self.values if isinstance(value, str))
        return Axis(
            knob=self.name,
            values=tuple(values),
            neutral=self.neutral,
            words=(None, *words) if words else (),
            is_flag=isinstance(self.neutral, bool) if self.effects else self.kind == "flag",
            also=tuple(each for each in dict.fromkeys(also) if each not in values),
            apart=bool(self.effects),
        )


Knobs: TypeAlias = "Mapping[str, Knob]"
"""The knobs of a task by name: what text calls them, and which values need no mention."""


def in_versions(versions: str, version: str | None) -> bool:
    """Return whether a PEP 440 specifier contains an engine release. An unknown release may be any."""
    if not versions or not version:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version)
    except InvalidVersion:
        return True
    return SpecifierSet(versions).contains(release, prereleases=True)


def _parse_listed(knob: Knob, value: object) -> Any:
    """Return the value with an effect, or the neutral one, that equals `value`; True does not equal 1."""
    same = (each for each in knob.values if each == value and isinstance(each, bool) == isinstance(value, bool))
    return next(same, _INVALID)


def _parse_int(knob: Knob, value: object) -> Any:
    number = knob.spellings.get(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int):
        return _INVALID
    if number == 0 and knob.neutral is None:
        return None  # not set: it has the code of None
    too_small = knob.minimum is not None and number < knob.minimum and value not in knob.spellings
    too_large = knob.maximum is not None and number > knob.maximum
    return _INVALID if too_small or too_large else number


def _parse_flag(knob: Knob, value: object) -> Any:
    return value if isinstance(value, bool) else _INVALID


def _parse_word(knob: Knob, value: object) -> Any:
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    word = str(knob.spellings.get(word, word))
    return word if word in knob.words else _INVALID


def _parse_text(knob: Knob, value: object) -> Any:
    return value if isinstance(value, str) and value else _INVALID


def _parse_words(knob: Knob, value: object) -> Any:
    """Return several words as one text, sorted, with commas."""
    given = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(given, list):
        return _INVALID
    words = {str(knob.spellings.get(each, each)) for each in given}
    return ",".join(sorted(words)) if words and words <= set(knob.words) else _INVALID


def _parse_share(knob: Knob, value: object) -> Any:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        return _INVALID
    return SHARES[max(1, round(number * len(SHARES))) - 1] if 0 < number <= 1 else _INVALID


_INVALID = object()
_PARSERS: Mapping[str, Callable[[Knob, object], Any]] = {
    "int": _parse_int,
    "flag": _parse_flag,
    "word": _parse_word,
    "share": _parse_share,
    "text": _parse_text,
    "words": _parse_words,
}


def _suggestion(knob: Knob, value: object) -> str:
    """Return the valid value nearest to `value`, or all of them, in words."""
    values = [_spelled(each) for each in knob.values or knob.words]
    near = get_close_matches(str(value), values, n=1) if isinstance(value, str) else []
    if near:
        return f"did you mean {near[0]}?"
    if values:
        return f"use {', '.join(values)}"
    low = "" if knob.minimum is None else f" from {knob.minimum:g}"
    high = "" if knob.maximum is None else f" to {knob.maximum:g}"
    kinds = {"flag": "true or false", "share": "a number above 0, at most 1"}
    null = ", or null" if knob.neutral is None and knob.kind == "int" else ""
    others = "".join(f", or {word}" for word in knob.spellings)
    return f"use {kinds.get(knob.kind, f'a whole number{low}{high}')}{null}{others}"


def _spelled(value: KnobValue) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
