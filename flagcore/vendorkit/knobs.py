"""Reads `knobs.yaml`: the knobs that a vendor's stack adds to an engine, each with its values, effect and source.

`knobs` is a list of `name` (the engine's own argument, or one that begins with the vendor's), `engine`, `says`,
`source`, `choices`, and maybe `chips` (all), `versions` (all), `default` (what is off: null, or false for a flag),
`claim` (what the source says it gains), `effect` (the source of the factors: estimated with its `method` where nobody
published a figure), `of_experts`, and `needs`, a list of `knob` with `at_least`, `at_most` or
`one_of`. A choice has a `value` and maybe `settings` (of the core, which predict it), `time` and `memory` (`value`,
`low`, `high`, the ends of an 80% interval; time with the `part` of a step), `flags` and `environment`; without the last
two, nobody published how to switch it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Chip
from flagcore.domain.knob import WHOLE_STEP, Effect, Factor, Knob, Requirement
from flagcore.vendorkit.fields import Part, read_parts
from flagcore.vendorkit.versions import in_range, read_versions

FILE = "knobs.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A knob with the engine, chips (none named: all) and releases that have it."""

    engine: str
    chips: tuple[str, ...]
    versions: str
    knob: Knob


def knobs(package: str, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Knob, ...]:
    """Return the knobs of `engine` on `chip`. Raises SpecError for a bad file."""
    return tuple(
        each.knob
        for each in all_knobs(package)
        if each.engine == engine
        and (not each.chips or chip.name in each.chips)
        and in_range(each.versions, engine_version)
    )


@cache
def all_knobs(package: str) -> tuple[Listed, ...]:
    """Return the knobs of a plugin's file; none without a file. Raises SpecError for a bad one."""
    file = files(package).joinpath(FILE)
    return read_knobs(file.read_text("utf-8"), f"{package}/{FILE}") if file.is_file() else ()


def read_knobs(text: str, file: str) -> tuple[Listed, ...]:
    """Return the knobs of a file's text. Raises SpecError naming `file`."""
    parts = read_parts(text, file, "a file of knobs")
    made = tuple(_listed(part) for part in _each(parts, "knobs"))
    parts.finish()
    return made


def _listed(part: Part) -> Listed:
    neutral = part.content.pop("default", None)
    effects = dict(_effect(each) for each in _each(part, "choices"))
    made = Listed(
        engine=part.required("engine", str),
        chips=tuple(part.listed("chips", str)),
        versions=read_versions(part),
        knob=Knob(
            name=part.required("name", str),
            neutral=neutral,
            effects=effects,
            help=part.required("says", str),
            claim=part.optional("claim", str, ""),
            effect_source=part.source("effect") if "effect" in part.content else None,
            requires=tuple(_requirement(each) for each in _each(part, "needs")),
            experts_only=part.optional("of_experts", bool, False),
            source=part.source("source"),
        ),
    )
    part.finish()
    return made


def _effect(part: Part) -> tuple[KnobValue, Effect]:
    value: KnobValue = part.content.pop("value", None)
    if value is None:
        raise part.wrong("value", "is missing")
    time, memory = part.part("time"), part.part("memory")
    made = Effect(
        settings=part.optional("settings", dict, {}),
        part=WHOLE_STEP if time is None else time.optional("part", str, WHOLE_STEP),
        time=_factor(time),
        memory=_factor(memory),
        flags=tuple(part.listed("flags", str)),
        environment=part.optional("environment", dict, {}),
    )
    part.finish()
    return value, made


def _factor(part: Part | None) -> Factor:
    if part is None:
        return Factor()
    value, low, high = (float(part.required(name, (int, float))) for name in ("value", "low", "high"))
    if not 0 < low <= value <= high:
        raise part.wrong("value", "must be between low and high, and all above 0", value=value)
    part.finish()
    return Factor(value=value, low=low, high=high)


def _requirement(part: Part) -> Requirement:
    made = Requirement(
        knob=part.required("knob", str),
        at_least=part.optional("at_least", int, None),
        at_most=part.optional("at_most", int, None),
        one_of=tuple(part.content.pop("one_of", ())),
    )
    part.finish()
    return made


def _each(part: Part, key: str) -> list[Part]:
    listed: list[Any] = part.listed(key, dict)
    return [Part(part.file, part.kind, f"{part.path}{key}[{place}].", entry) for place, entry in enumerate(listed)]
