"""The sections of specs and job records that depend on an engine's knobs: space, baseline, settings and candidate."""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from operator import methodcaller
from typing import Annotated, Any, Literal, Protocol, TypeAlias, runtime_checkable

from pydantic import BeforeValidator, Field, create_model

from flagcore.contracts import Engine
from flagcore.domain.knob import Knob
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import AUTO, SettingValue, TrainSpec
from flagcore.domain.work import Work
from flagcore.errors import SpecError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import KeyPath, spec_error
from flagcore.spec.validate import DID_YOU_MEAN, Section

Engines: TypeAlias = Mapping[str, Engine]
"""The installed engines by name. An engine is loaded only when it is looked up."""


OTHER_KIND = {
    "train": (N_("is a serving engine"), N_("name a training engine, or write a serve section")),
    "serve": (N_("is a training engine"), N_("name a serving engine, or write a train section")),
}
"""The problem and the fix if a section names an engine of the other kind of these two, by the section."""


@runtime_checkable
class Installable(Protocol):
    """An optional interface of `Engines`."""

    kinds: Mapping[str, type[Work]]
    """The installed kinds of jobs by name. A kind is loaded only when it is looked up."""

    def missing(self, name: str) -> str:
        """Return the command that installs the engine `name`, or an empty text if there is none."""


def kinds_of(engines: Engines) -> Mapping[str, type[Work]]:
    """Return the kinds of jobs that are installed with `engines`. Training always is."""
    return engines.kinds if isinstance(engines, Installable) else {TrainSpec.kind: TrainSpec}


def sections_of(engines: Engines, keys: Collection[str]) -> dict[str, Any]:
    """Return the fields that other distributions add to a spec with `keys`, or all without keys."""
    return getattr(engines, "sections", lambda _keys: {})(keys)


def missing_engine(name: str, engines: Engines) -> str:
    """Return the command that installs the engine `name`, or an empty text if there is none."""
    return engines.missing(name) if isinstance(engines, Installable) else ""


def knobs_of(
    name: str, engines: Engines, key: KeyPath | str, file: str = "", kind: str = TrainSpec.kind
) -> tuple[Knob, ...]:
    """Return the knobs of the engine `name`.

    `key`: the key of the spec that names the engine, for errors.
    Raises SpecError if the engine is not installed, or if it is not of this `kind`.
    """
    if name not in engines:
        similar = get_close_matches(name.lower(), engines, n=3)
        fix = _("installed: {names}", names=", ".join(engines) or _("none"))
        fix = _(DID_YOU_MEAN, name=", ".join(similar)) if similar else fix
        fix = missing_engine(name, engines) or fix
        raise spec_error(key, _("is not an installed engine"), value=name, fix=fix, file=file)
    if (other := engines[name].kind) != kind:
        problem, fix = _("is an engine for {kind}", kind=other), _("write a {kind} section", kind=other)
        if {kind, other} <= OTHER_KIND.keys():
            problem, fix = map(_, OTHER_KIND[kind])
        raise spec_error(key, problem, value=name, fix=fix, file=file)
    return engines[name].knobs


def space_section(knobs: Sequence[Knob], suffix: str) -> type[Section]:
    """Return the pydantic model of the section `space` for these knobs."""
    doc = "The search space: for each knob a value, a list of values, or auto (every legal value)."
    rows = [
        (knob, listed_type(_nullable_type(knob)), AUTO) if knob.searchable else (knob, _compared_type(knob), None)
        for knob in knobs
        if knob.choosable
    ]
    return section_of(f"Space{suffix}", doc, rows)


def baseline_section(knobs: Sequence[Knob], suffix: str) -> type[Section]:
    """Return the pydantic model of the section `baseline` for these knobs."""
    doc = "The baseline: a value for some or all knobs. Missing knobs are off or 1; DP uses the remaining devices."
    rows = [(knob, _nullable_type(knob), None) for knob in knobs if knob.choosable]
    return section_of(f"Baseline{suffix}", doc, rows)


@lru_cache(maxsize=64)
def candidate_section(knobs: tuple[Knob, ...]) -> type[Section]:
    """Return the pydantic model of a job record's candidate for these knobs. It also accepts settings."""
    doc = "One candidate of a job record."
    return section_of("Candidate", doc, [(knob, _nullable_type(knob), None) for knob in knobs])


@lru_cache(maxsize=64)
def settings_section(knobs: tuple[Knob, ...], suffix: str = "") -> type[Section]:
    """Return the pydantic model of the section `settings` for these knobs."""
    settings = [knob for knob in knobs if "setting" in knob.scope]
    fields = {knob.name: (value_type(knob) | None, Field(None, description=knob.help)) for knob in settings}
    doc = "Settings of the engine for all candidates. Missing or null: the engine's default."
    return create_model(f"Settings{suffix}", __base__=Section, __doc__=doc, **fields)  # type: ignore[call-overload,no-any-return]


def space_of(section: Section, knobs: Sequence[Knob]) -> dict[str, str | tuple[KnobValue, ...]]:
    """Return the values of each knob in a validated space, without duplicates, or "auto"."""
    by_name, space = {knob.name: knob for knob in knobs}, dict[str, str | tuple[KnobValue, ...]]()
    for name, value in section.model_dump().items():
        if (by_name[name].effects or by_name[name].comparable) and name not in section.model_fields_set:
            continue  # knobs with effects, and settings, are searched only if the spec's space names them
        values = value if isinstance(value, list) else [value]
        parsed = (_parsed(by_name[name], each) for each in values if each != AUTO)
        space[name] = AUTO if value == AUTO else tuple(dict.fromkeys(parsed))
    return space


def candidate_of(section: Section, knobs: Sequence[Knob], *, settings: bool) -> dict[str, KnobValue]:
    """Return the knob values in a validated baseline or in the candidate of a job record.

    `settings`: whether to include settings that a space can compare.
    """
    values = section.model_dump(exclude_unset=True)
    scopes = {knob.name: knob.searchable or "record" in knob.scope or (settings and knob.comparable) for knob in knobs}
    candidates = {knob.name: knob for knob in knobs if scopes[knob.name]}
    return {name: _parsed(candidates[name], value) for name, value in values.items() if name in candidates}


def _parsed(knob: Knob, value: Any) -> KnobValue:
    """Convert the value of a knob. Values of knobs with effects are validated later, when the chip is known."""
    return value if knob.effects else knob.parse(value, knob.name)


def settings_of(
    section: Section, knobs: Sequence[Knob], *, exclude: Collection[str] = (), at: str = ""
) -> dict[str, SettingValue]:
    """Return the settings in a section that are not null, sorted by name. Lists become comma-separated strings.

    `exclude`: names of settings to skip. Raises SpecError, with a key that starts with `at`, if a setting and its
    negation contradict each other.
    """
    settings: dict[str, SettingValue] = {}
    by_name = {knob.name: knob for knob in knobs if "setting" in knob.scope and knob.name not in exclude}
    values = section.model_dump(include=set(by_name))
    for name, value in sorted(values.items()):
        negated = by_name[name].negated_knob
        if value is None:
            continue
        if isinstance(value, list):
            settings[name] = ",".join(map(str, sorted(set(value)) if by_name[name].kind == "words" else value))
        elif negated:
            if values.get(negated) is value:
                problem = f"is the negation of {negated}, which is {str(value).lower()} too"
                raise SpecError(key=at + name, value=value, problem=problem, fix="remove one of the two")
            settings[negated] = not value
        else:
            settings[name] = value
    return settings


def knobs_of_engine(space: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Return the values in a space or baseline for one engine. Its own section overrides the values for all engines."""
    common = {key: value for key, value in space.items() if not isinstance(value, Mapping) and key != engine}
    return {**common, **(space.get(engine) or {})}


def section_of(name: str, doc: str, rows: Sequence[tuple[Knob, Any, Any]]) -> type[Section]:
    """Return the pydantic model of a section of knobs.

    `rows`: the knobs, each with the type of its values and its default.
    """
    no_default = methodcaller("pop", "default", None)  # in the JSON Schema: a missing knob does not mean null
    fields: dict[str, Any] = {
        knob.name: (kind, Field(default, description=knob.help, json_schema_extra=None if default else no_default))
        for knob, kind, default in rows
    }
    return create_model(name, __base__=Section, __doc__=doc, **fields)


def listed_type(kind: Any) -> Any:
    """Return the type of a value in a space: one of `kind`, a list of them, or `auto`."""
    return Literal["auto"] | kind | Annotated[list[kind], Field(min_length=1)]


def _compared_type(knob: Knob) -> Any:
    """Return the type of a setting in a space: a value, a list of values, or `auto`. A value of kind words is one
    string, because a list means several values."""
    if knob.kind != "words":
        return listed_type(value_type(knob) | None)
    word: Any = Literal[knob.words or ("",)]
    text: Any = _words_text(knob)
    listed: Any = list[text | list[word] | None]
    return Literal["auto"] | text | Annotated[listed, Field(min_length=1)]


def _words_text(knob: Knob) -> Any:
    """Return the type of a string of several words that are separated by commas or blanks."""
    word = "|".join(map(re.escape, (*knob.words, *knob.spellings)))
    return Annotated[str, Field(pattern=f"^[ ,]*({word})([ ,]+({word}))*[ ,]*$", examples=[",".join(knob.words[:2])])]


def value_type(knob: Knob) -> Any:
    """Return the type of a knob's values, including alternative spellings. For a knob with effects, valid values depend
    on the chip, so the type includes any boolean, integer, string or null."""
    if knob.effects:
        return bool | int | str | None
    words: Any = (*knob.words, *knob.spellings)
    if knob.kind in ("int", "ints", "number", "share"):
        return _number_type(knob, words)
    if knob.kind == "words":
        return _word_list(Literal[knob.words or ("",)], knob)
    if knob.kind == "word" and words:
        kind: Any = Literal[words + tuple(int(word) for word in words if word.isdigit())]
        return kind | bool if {"on", "off"} & set(words) else kind  # YAML 1.1 reads on and off as booleans
    if knob.kind == "flag":
        return bool
    return Annotated[str, Field(min_length=1, max_length=200 if knob.kind == "word" else int(knob.maximum or 4096))]


def _number_type(knob: Knob, words: Any) -> Any:
    """Return the type of the values of a numeric knob. `words`: those that stand for an integer."""
    if knob.kind == "share":
        return Annotated[float, Field(gt=0, le=1)] | Annotated[str, Field(pattern=_SHARE, examples=["0.9"])]
    if knob.kind == "number":
        low: Any = {"ge": knob.minimum} if knob.exclusive_minimum is None else {"gt": knob.exclusive_minimum}
        return Annotated[float, Field(**low, le=knob.maximum)]
    number: Any = Annotated[int, Field(ge=-1 if knob.minimum is None else knob.minimum, le=knob.maximum or 2**31)]
    if knob.kind == "ints":
        return Annotated[list[number], Field(min_length=1)]
    return number | Literal[words] if words else number


_SHARE = r"^(0?\.[0-9]{1,9}|1(\.0{1,9})?)$"


def _nullable_type(knob: Knob) -> Any:
    """Return the type of a knob's value in a training spec. Null is valid for a setting, and as a neutral value."""
    return value_type(knob) if knob.searchable and knob.neutral is not None else value_type(knob) | None


def _word_list(word: Any, knob: Knob) -> Any:
    """Return the type of several words: a list, or one string in which commas or blanks separate the words."""

    def split(value: object) -> object:
        words = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(words, list):
            return words
        return [knob.spellings.get(each, each) if isinstance(each, str) else each for each in words]

    text = _words_text(knob)
    listed: Any = Annotated[list[word], Field(min_length=1)]
    return Annotated[listed, BeforeValidator(split, json_schema_input_type=text | listed)]
