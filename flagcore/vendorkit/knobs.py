"""Reads `knobs.yaml`: the knobs that a vendor's software adds to an engine, each with its values, effect and source.

`knobs` is a list with the keys `name` (the engine's argument, or a name with the vendor as prefix), `engine`, `says`,
`source` and `choices`. Optional keys: `label` (short name for tables), `chips` (default: all), `versions` (default:
all), `default` (the neutral value: null, or false for a flag), `claim` (the gain that the source claims), `effect` (the
source of the factors: estimated with its `method` if no figure was published), `of_experts`, and `needs`, a list of
`knob` with `at_least`, `at_most` or `one_of`. A choice has a `value` and optionally `settings` (of the core, for the
prediction), `time` and `memory` (`value`, `low`, `high`, the ends of an 80% interval; time with the `part` of a step),
`flags` and `environment`. Without the last two, no source documents how to enable it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Chip
from flagcore.domain.knob import Effect, Knob
from flagcore.errors import SpecError
from flagcore.vendorkit.fields import Content, build, entries, finish, read_file
from flagcore.vendorkit.scope import Scope

FILE = "knobs.yaml"
KEYS = {
    "name": "name",
    "label": "label",
    "default": "neutral",
    "says": "help",
    "claim": "claim",
    "effect": "effect_source",
    "needs": "requires",
    "of_experts": "experts_only",
    "source": "source",
    "choices": "effects",
}
"""The fields of a knob by the keys of the file."""
SCOPE = ("engine", "engines", "kinds", "chips", "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A knob with the engine, chips and releases that have it."""

    scope: Scope
    knob: Knob


def knobs(package: str, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Knob, ...]:
    """Return the knobs of `engine` on `chip`. Raises SpecError for a bad file."""
    return tuple(each.knob for each in all_knobs(package) if each.scope.includes(chip, engine, engine_version))


@cache
def all_knobs(package: str) -> tuple[Listed, ...]:
    """Return the knobs of a plugin's file; empty without a file. Raises SpecError for an invalid file."""
    content, file = read_file(package, FILE) or {}, f"{package}/{FILE}"
    found = []
    for path, entry in entries(content, "knobs", file):
        scope: Scope = build(Scope, {key: entry.pop(key) for key in SCOPE if key in entry}, file, path)
        if not scope.engines:
            raise SpecError(file=file, key=f"{path}engine", problem="is missing")
        effects = dict(_effect(choice, file, path + at) for at, choice in entries(entry, "choices", file))
        knob: Knob = build(Knob, entry, file, path, KEYS)
        found.append(Listed(scope=scope, knob=replace(knob, effects=effects)))
    finish(content, file)
    return tuple(found)


def _effect(choice: Content, file: str, path: str) -> tuple[KnobValue, Effect]:
    value: KnobValue = build(bool | int | str, choice.pop("value", None), file, f"{path}value")
    time = choice.get("time")
    if isinstance(time, dict) and "part" in time:
        choice["part"] = time.pop("part")
    return value, build(Effect, choice, file, path)
