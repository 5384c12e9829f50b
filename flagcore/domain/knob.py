"""Knobs: tunable options of an engine, its own or added by a plugin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from flagcore.domain.chip import Source
from flagcore.domain.space import Axis, KnobValue
from flagcore.errors import SpecError
from flagcore.i18n import N_, Message, closest

Kind = Literal["int", "flag", "word", "share", "number", "text", "words", "ints"]
"""The type of a knob's values.

- int: an integer
- flag: true or false
- word: one of `words`
- share: a number in (0, 1]

Settings may also have these types:

- number: any number
- text: any text
- words: several of `words`
- ints: several integers
"""

Scope = Literal["space", "record", "setting"]
"""Where users may set a knob.

- space: in a space, in a baseline, and in the candidate of a job record
- record: only in the candidate of a job record
- setting: in the settings of a job

If a knob has both `space` and `setting`, it is a setting whose values a space may compare.
"""

ANSWERS = ("same", "rounding", "seeds", "changes")
"""What a knob may do to results, the least first: nothing; other kernels or orders of sums; in a user's program also
other random numbers, such as initial weights; other formats or another computation."""

WHOLE_STEP = "step"
"""The value of `Effect.part` for an effect on the whole step."""

SHARES = tuple(f"{thousandths / 1000:g}" for thousandths in range(1, 1001))
"""All values of a knob of kind share, as strings in steps of 0.001. Because this list is fixed, a value has the same
code in all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A multiplier and the bounds of its 80% interval."""

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.value <= self.high < math.inf:
            raise ValueError(f"a factor must have 0 < low <= value <= high: {self.low}, {self.value}, {self.high}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one value of a knob changes.

    If `passed` is false and both `flags` and `environment` are empty, trials cannot use the value.

    `settings`: engine settings for the prediction.
    `passed`: whether the engine also starts trials with `settings`.
    `part`: the parts of the step that `time` scales: keys of `Prediction.time_s`, with spaces between, or WHOLE_STEP.
    `memory`: the factor by which the peak of allocated memory changes.
    `flags`: arguments that are added to the user's launch command.
    `environment`: environment variables that are added to a trial.
    """

    settings: Mapping[str, KnobValue | float] = field(default_factory=dict)
    passed: bool = False
    part: str = WHOLE_STEP
    time: Factor = Factor()
    memory: Factor = Factor()
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def no_launch_reason(self, *, user_command: bool) -> str:
        """Return the reason why a trial cannot use the value, or an empty string if it can.

        `user_command`: whether trials run the user's command, to which flags can be added.
        """
        if self.passed:
            return ""
        if self.flags:
            return (
                ""
                if user_command
                else Message("{flags} needs a launch command: give train.command", flags=" ".join(self.flags))
            )
        return "" if self.environment else N_("no source documents how to enable it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A condition on another knob: a minimum, a maximum, or a list of valid values."""

    knob: str
    at_least: int | None = None
    at_most: int | None = None
    one_of: tuple[KnobValue, ...] = ()

    def __str__(self) -> str:
        minimum = f">= {self.at_least}" if self.at_least is not None else ""
        maximum = f"<= {self.at_most}" if self.at_most is not None else ""
        values = " or ".join("not set" if each is None else str(each).lower() for each in self.one_of)
        return f"{self.knob} {minimum or maximum or values}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A command-line flag of the engine for a knob, without leading dashes.

    `name`: the flag that sets a value, or True. Empty if there is none.
    `off`: the flag that sets False. Empty if there is none.
    `word`: the only value that the flag sets. If it is given, the flag has no argument.
    `versions`: a PEP 440 specifier of the engine releases that accept the flag. Empty means all.
    """

    name: str = ""
    off: str = ""
    word: str = ""
    versions: str = ""

    def sets(self, value: KnobValue | float) -> bool:
        """Return whether the flag can set `value`."""
        if self.word:
            return value == self.word
        return bool(self.off if value is False else self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A tunable option of an engine: its meaning, its values, and how it is set."""

    name: str
    help: str = ""
    """One sentence for the schema, the reference and the report."""
    label: str = ""
    """A short name for tables and the command line, such as TP. Empty means `name`."""
    part_of: str = ""
    """The knob that this one refines. Its value is shown after the other knob's value: `recompute full uniform 1`."""
    shows_neutral: bool = False
    """Whether a candidate that is written as text also includes the knob's neutral value."""
    layout: bool = False
    """Whether the knob is part of the layout: candidates with equal values of all such knobs have the same layout."""
    kind: Kind = "int"
    scope: tuple[Scope, ...] = ("space",)
    words: tuple[str, ...] = ()
    """The allowed values of a knob of kind word or words. For kind text: the values that a space may list."""
    spellings: Mapping[str, int | str] = field(default_factory=dict)
    """Aliases that users may write, and the values they stand for. An alias is a word for a number, such as `off` for
    -1, or a former name of a word."""
    minimum: float | None = 1
    maximum: float | None = None
    exclusive_minimum: float | None = None
    """A lower bound that a number must exceed. It replaces `minimum`."""
    neutral: KnobValue = None
    """The value that the engine uses if the knob is not set."""
    auto: Callable[..., Sequence[KnobValue]] | None = None
    """A function of the task that returns the values that `auto` means. None means that `auto` is not allowed."""
    auto_help: str = ""
    """The meaning of `auto` as a phrase, such as "every divisor of the number of devices"."""
    memory_order: int = 0
    """+1 if a larger value needs at least as much memory, -1 if a smaller value does, 0 if unknown."""
    flags: tuple[Flag, ...] = ()
    """The engine's flags for the knob, in order of preference. Empty if there are none."""
    passes_neutral: bool = False
    """Whether the command line also contains the flag if the value is neutral."""
    aliases: tuple[str, ...] = ()
    """Other names that specs and job records use."""
    negated_knob: str = ""
    """If the knob negates another knob: the name of the other knob, which is set instead of this one."""
    versions: str = ""
    """A PEP 440 specifier of the engine releases that support the knob. Empty means all."""
    effects: Mapping[KnobValue, Effect] = field(default_factory=dict)
    """The effect of each value. Plugins leave out `neutral`. A knob with effects has no other values."""
    requires: tuple[Requirement, ...] = ()
    """Conditions on other knobs, which apply if this knob's value is not neutral."""
    experts_only: bool = False
    """Whether the knob applies only to mixture-of-experts models."""
    source: Source | None = None
    """The document that describes the knob. Required for plugins' knobs."""
    claim: str = ""
    """The gain that the source claims for the knob, in words."""
    answers: str = "rounding"
    """What other values do to the results of a job: one of ANSWERS."""
    effect_source: Source | None = None
    """The source of the factors in `effects`. None means `source`."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def title(self) -> str:
        """The label, or the name if there is no label."""
        return self.label or self.name

    @property
    def searchable(self) -> bool:
        """Whether every space includes the knob, even if the spec does not name it."""
        return "space" in self.scope and "setting" not in self.scope

    @property
    def comparable(self) -> bool:
        """Whether the knob is a setting whose values a space can compare."""
        return {"space", "setting"} <= set(self.scope)

    @property
    def choosable(self) -> bool:
        """Whether a space and a baseline may name the knob."""
        return "space" in self.scope

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)

    @property
    def values(self) -> tuple[KnobValue, ...]:
        """All values of a knob with effects, the neutral value first. Empty for other knobs."""
        return tuple(dict.fromkeys((self.neutral, *self.effects))) if self.effects else ()

    def effect(self, value: KnobValue) -> Effect | None:
        """Return the effect of `value`, or None if it has none."""
        return self.effects.get(value)

    def with_compared_values(self, values: Sequence[KnobValue]) -> Knob:
        """Return this engine setting as a knob with one `Effect` per value, so that a space can compare `values`."""
        settings = (value for value in (self.neutral, *values) if value is not None)
        effects: dict[KnobValue, Effect] = {
            value: Effect(settings={self.name: value}, passed=True) for value in settings
        }
        return replace(self, effects=effects)

    def is_available(self, version: str | None) -> bool:
        """Return whether an engine release supports the knob. True if the release is unknown."""
        return in_versions(self.versions, version)

    def arguments(self, value: KnobValue | float, version: str | None = None) -> tuple[str, ...]:
        """Return the command-line arguments that set `value` in an engine release. Empty if none are needed."""
        flag = next((each for each in self.flags if each.sets(value) and in_versions(each.versions, version)), None)
        if flag is None or value is None or (value == self.neutral and not self.passes_neutral):
            return ()
        if isinstance(value, bool) or flag.word:
            return (f"--{flag.off if value is False else flag.name}",)
        values = str(value).split(",") if self.kind in ("words", "ints") else [str(value)]
        return (f"--{flag.name}", *values)

    def value_in(self, mapping: Mapping[str, Any]) -> Any:
        """Return the value that `mapping` has under the knob's name or an alias, or None if it has neither."""
        return next((mapping[name] for name in self.names if name in mapping), None)

    def parse(self, value: object, key: str) -> KnobValue:
        """Convert the `value` of the spec's key `key` to a value of this knob. Raises SpecError if it is invalid."""
        if value is None and (self.neutral is None or not self.effects):
            return self.neutral
        result: KnobValue = _parsed(self, value)
        if result is _INVALID:
            problem, fix = f"is not a valid value of {self.name}", _suggestion(self, value)
            raise SpecError(key=key, value=value, problem=problem, fix=fix)
        return result

    def axis(self, values: Sequence[KnobValue], extra_values: Sequence[KnobValue] = ()) -> Axis:
        """Return the knob's axis with `values`.

        `extra_values`: values that candidates may have, but that are not combined with other knobs' values.
        """
        words = {"share": SHARES, "word": self.words, "text": self.words}.get(self.kind, ())
        if self.effects:
            words = tuple(value for value in self.values if isinstance(value, str))
        return Axis(
            knob=self.name,
            values=tuple(values),
            neutral=self.neutral,
            words=(None, *words) if words else (),
            is_flag=isinstance(self.neutral, bool) if self.effects else self.kind == "flag",
            extra_values=tuple(each for each in dict.fromkeys(extra_values) if each not in values),
            is_unordered=bool(self.effects),
        )


Knobs: TypeAlias = Mapping[str, Knob]
"""The knobs of a task by name."""


def in_versions(versions: str, version: str | None) -> bool:
    """Return whether a PEP 440 specifier contains an engine release. True if the release is unknown."""
    if not versions or not version:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(version)
    except InvalidVersion:
        return True
    return SpecifierSet(versions).contains(release, prereleases=True)


_INVALID = object()


def _parsed(knob: Knob, value: object) -> Any:
    """Return `value` converted to a valid value of the knob, or _INVALID if that is impossible.

    If the kind of the knob is `words`, the words become one sorted, comma-separated string.
    """
    if knob.effects:  # True must not match 1, although Python treats them as equal
        equal = (each for each in knob.values if each == value and isinstance(each, bool) == isinstance(value, bool))
        return next(equal, _INVALID)
    text = value if value and isinstance(value, str) else _INVALID
    return _PARSERS[knob.kind](knob, value) if knob.kind in _PARSERS else text


def _parsed_word(knob: Knob, value: object) -> Any:
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    word = str(knob.spellings.get(word, word))
    return word if word in knob.words else _INVALID


def _parsed_words(knob: Knob, value: object) -> Any:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    words = {str(knob.spellings.get(each, each)) for each in items} if isinstance(items, list) else set()
    return ",".join(sorted(words)) if words and words <= set(knob.words) else _INVALID


def _parsed_int(knob: Knob, value: object) -> Any:
    number = knob.spellings.get(str(value), value)
    if isinstance(number, bool) or not isinstance(number, int):
        return _INVALID
    too_small = knob.minimum is not None and number < knob.minimum and str(value) not in knob.spellings
    if number == 0 and knob.neutral is None and not too_small:
        return None  # in columns, code 0 stands for None, which means not set
    too_large = knob.maximum is not None and number > knob.maximum
    return _INVALID if too_small or too_large else number


def _parsed_share(_knob: Knob, value: object) -> Any:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        return _INVALID
    return SHARES[max(1, round(number * len(SHARES))) - 1] if 0 < number <= 1 else _INVALID


_PARSERS: Mapping[str, Callable[[Knob, object], Any]] = {
    "flag": lambda _knob, value: value if isinstance(value, bool) else _INVALID,
    "int": _parsed_int,
    "share": _parsed_share,
    "word": _parsed_word,
    "words": _parsed_words,
}
"""The functions that convert a value of each kind of knob. Values of other kinds are texts."""


def _suggestion(knob: Knob, value: object) -> str:
    """Return a fix for an invalid value: the most similar valid value, or all valid values."""
    given = ("null" if each is None else each for each in knob.values or knob.words)
    values = [str(each).lower() if isinstance(each, bool) else str(each) for each in given]
    if isinstance(value, str) and (similar := closest(value, values)):
        return f"did you mean {similar}?"
    if values:
        return f"use {', '.join(values)}"
    low = "" if knob.minimum is None else f" from {knob.minimum:g}"
    high = "" if knob.maximum is None else f" to {knob.maximum:g}"
    kinds = {"flag": "true or false", "share": "a number above 0, at most 1"}
    null = ", or null" if knob.neutral is None and knob.kind == "int" else ""
    spellings_text = "".join(f", or {word}" for word in knob.spellings)
    return f"use {kinds.get(knob.kind, f'a whole number{low}{high}')}{null}{spellings_text}"
