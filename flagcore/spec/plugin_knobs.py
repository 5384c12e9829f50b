"""Keys of a space and a baseline that plugins bring: taken off before a document is checked, and checked by themselves.

Whether a value is one of the knob's is known when the chip is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import AUTO
from flagcore.errors import SpecError
from flagcore.spec.plain_data import spec_error

WHERE = ("space", "baseline")


def split_off(data: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a document without the keys of `names` in its space and baseline, and these."""
    beside: dict[str, dict[str, Any]] = {where: {} for where in WHERE}
    tuner = data.get("auto_tuner")
    if not names or not isinstance(tuner, Mapping):
        return dict(data), beside
    rest = dict(tuner)
    for where in WHERE:
        if isinstance(rest.get(where), Mapping):
            beside[where] = {name: value for name, value in rest[where].items() if name in names}
            rest[where] = {name: value for name, value in rest[where].items() if name not in names}
    return {**data, "auto_tuner": rest}, beside


def plugin_space(given: Mapping[str, Any], file: str) -> dict[str, str | tuple[KnobValue, ...]]:
    """Return each knob's values, or auto. Raises SpecError for what is no value, list of values or auto."""
    return {name: value if value == AUTO else _values(name, value, file) for name, value in given.items()}


def plugin_baseline(beside: Mapping[str, Mapping[str, Any]], file: str) -> dict[str, KnobValue]:
    """Return each knob's value. Raises SpecError for a list or a mapping."""
    given = beside["baseline"]
    return {name: _value(("auto_tuner", "baseline", name), value, file) for name, value in given.items()}


def with_plugin_knobs(error: SpecError, names: Collection[str]) -> SpecError:
    """Return the error of an unknown key of a space with the plugins' knobs among those that are known, if no other is
    meant."""
    if not names or not error.key.startswith("auto_tuner.space.") or "not a known key" not in error.problem:
        return error
    near = get_close_matches(error.key.rpartition(".")[2], names, n=1)
    if not near and not error.fix.startswith("known"):
        return error
    told = f"did you mean {near[0]}, a plugin's knob?" if near else f"plugins' knobs: {', '.join(sorted(names))}"
    fix = told if near else f"{error.fix}; {told}".removeprefix("; ")
    return SpecError(key=error.key, value=error.value, problem=error.problem, fix=fix, file=error.file)


def _values(name: str, value: Any, file: str) -> tuple[KnobValue, ...]:
    at = ("auto_tuner", "space", name)
    if isinstance(value, list) and not value:
        raise spec_error(at, "must be a value, a non-empty list of values, or auto", file=file)
    return tuple(dict.fromkeys(_value(at, each, file) for each in (value if isinstance(value, list) else [value])))


def _value(at: tuple[str, ...], value: Any, file: str) -> KnobValue:
    if value is not None and not isinstance(value, (bool, int, str)):
        raise spec_error(at, "must be a word, a whole number, true, false or null", value=value, file=file)
    return value
