"""The engine's rules and merges where knobs change its settings: each combination of values may have its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from types import FunctionType, MethodType
from typing import TypeAlias, TypeVar

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.effects import engine_task, plugin_axis
from flagcore.domain.knob import Knob
from flagcore.domain.space import Axis, BoolArray, Columns, IntArray, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError

MAX_COMBINATIONS = 4096
"""The most combinations of compared settings."""

T = TypeVar("T")
_RulesOf: TypeAlias = "Callable[[Task], tuple[Rule, ...]]"
_MergesOf: TypeAlias = "Callable[[Task], tuple[Merge, ...]]"
_Values: TypeAlias = "tuple[KnobValue, ...]"
_Cases: TypeAlias = "Mapping[_Values, T | None]"


@dataclass(frozen=True, slots=True)
class _Variant:
    """What holds with one combination of values, by name (rules: and message). With an error, nothing is legal."""

    values: _Values
    rules: Mapping[tuple[str, str], Rule]
    merges: Mapping[str, Merge] = field(default_factory=dict)
    error: SpecError | None = None


def engine_legality(task: Task, rules_of: _RulesOf, merges_of: _MergesOf) -> tuple[tuple[Rule, ...], tuple[Merge, ...]]:
    """Return the engine's rules and merges for all candidates of a task, from those that it has for a task.

    Raises SpecError for a value that no combination of settings can have, and for too many combinations.
    """
    knobs = [knob for knob in task.knobs if any(effect.settings for effect in knob.effects.values())]
    if not knobs:
        return rules_of(engine_task(task)), merges_of(engine_task(task))
    if (count := prod(len(knob.values) for knob in knobs)) > MAX_COMBINATIONS:
        problem = f"compares {count:,} combinations of settings, of at most {MAX_COMBINATIONS:,}"
        raise SpecError(key="auto_tuner.space", problem=problem, fix="give shorter lists")
    variants = [
        _variant(task, rules_of, merges_of, knobs, values) for values in product(*(knob.values for knob in knobs))
    ]
    _require_possible(task, knobs, variants)
    axes = [plugin_axis(task, knob) for knob in knobs]
    rules, merges = [], []
    for key in dict.fromkeys(key for each in variants for key in each.rules):
        cases = {each.values: each.rules.get(key) for each in variants if each.error is None or key in each.rules}
        rules.append(_rule(axes, cases))
    for name in dict.fromkeys(name for each in variants for name in each.merges):
        merges.append(_merge(axes, {each.values: each.merges.get(name) for each in variants if each.error is None}))
    return tuple(rules), tuple(merges)


def _variant(task: Task, rules_of: _RulesOf, merges_of: _MergesOf, knobs: Sequence[Knob], values: _Values) -> _Variant:
    effects = [knob.effect(value) for knob, value in zip(knobs, values, strict=True)]
    one = engine_task(task, [effect for effect in effects if effect])
    try:
        rules = {(rule.name, rule.message): rule for rule in rules_of(one)}
        return _Variant(values, rules, {merge.name: merge for merge in merges_of(one)})
    except SpecError as error:
        name = error.key.rpartition(".")[2]
        rule = Rule(name=name, knobs=(), message=f"{name} {error.problem}", broken=_every_row)
        return _Variant(values, {(rule.name, rule.message): rule}, error=error)


def _require_possible(task: Task, knobs: Sequence[Knob], variants: Sequence[_Variant]) -> None:
    """Raise SpecError if all combinations are excluded, or all with a value that the space lists."""
    errors = [each.error for each in variants if each.error]
    if len(errors) == len(variants):
        raise errors[0]
    for place, knob in enumerate(knobs):
        asked = task.spec.space.get(knob.name, ())
        for value in () if isinstance(asked, str) else asked:
            found = [each.error for each in variants if each.values[place] == value]
            if all(found) and found[0]:
                key = f"auto_tuner.space.{knob.name}"
                raise SpecError(key=key, value=value, problem=f"is not possible: {found[0]}")


def _rule(axes: Sequence[Axis], cases: _Cases[Rule]) -> Rule:
    """Return one rule for all combinations. That of a single value has its name and its message."""
    rule = next(each for each in cases.values() if each)
    own, found = _by_codes(axes, cases)
    if not own:
        return rule
    if len(own) == len(found) == 1 and rule.name != own[0].knob:
        ((code,),) = found
        if code != own[0].encode(own[0].neutral):
            message = f"{own[0].knob} = {own[0].decode(code)}: {rule.message}"
            rule = replace(rule, name=f"{own[0].knob}_{rule.name}", message=message)
    names = tuple(axis.knob for axis in own)
    broken = partial(_broken, names, {codes: each.broken for codes, each in found.items()})
    return replace(rule, knobs=(*names, *rule.knobs), broken=broken)


def _merge(axes: Sequence[Axis], cases: _Cases[Merge]) -> Merge:
    """Return one merge for all combinations."""
    merge = next(each for each in cases.values() if each)
    own, found = _by_codes(axes, cases)
    if not own:
        return merge
    names = tuple(axis.knob for axis in own)
    canonical = partial(_canonical, names, merge.knobs, {codes: each.canonical for codes, each in found.items()})
    return replace(merge, knobs=(*names, *merge.knobs), canonical=canonical)


def _by_codes(axes: Sequence[Axis], cases: _Cases[T]) -> tuple[list[Axis], dict[tuple[int, ...], T]]:
    """Return the axes on which a rule or merge depends, and what it is for each combination of their codes."""
    places = _places(axes, cases)
    codes = {values: tuple(axes[place].encode(values[place]) for place in places) for values in cases}
    return [axes[place] for place in places], {codes[values]: each for values, each in cases.items() if each}


def _places(axes: Sequence[Axis], cases: _Cases[T]) -> list[int]:
    """Return the places of the knobs on which a rule or merge depends."""
    found = []
    for place in range(len(axes)):
        first: dict[_Values, T | None] = {}
        for values, each in cases.items():
            if not _same(first.setdefault(values[:place] + values[place + 1 :], each), each):
                found.append(place)
                break
    return found


def _same(one: object, other: object) -> bool:
    """Return whether two rules or merges are the same: functions of the same code with equal values."""
    if isinstance(one, (Rule, Merge)) and isinstance(other, (Rule, Merge)):
        functions = [each.broken if isinstance(each, Rule) else each.canonical for each in (one, other)]
        return _same(*functions)
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and bool(one.__self__ == other.__self__)
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        cells = zip(one.__closure__ or (), other.__closure__ or (), strict=False)
        return one.__code__ is other.__code__ and all(_same(a.cell_contents, b.cell_contents) for a, b in cells)
    return one is other or (type(one) is type(other) and bool(one == other))


def _cases_of(names: Sequence[str], columns: Columns) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """Yield each combination of codes, and the rows that have it."""
    kinds, which = np.unique(np.stack([columns[name] for name in names]), axis=1, return_inverse=True)
    for place, codes in enumerate(kinds.T.tolist()):
        yield tuple(codes), np.flatnonzero(which.reshape(-1) == place)


def _broken(
    names: Sequence[str], known: Mapping[tuple[int, ...], Callable[[Columns], BoolArray]], columns: Columns
) -> BoolArray:
    result = np.zeros(columns[names[0]].shape, dtype=np.bool_)
    for codes, rows in _cases_of(names, columns):
        if codes in known:
            result[rows] = known[codes]({name: column[rows] for name, column in columns.items()})
    return result


def _canonical(
    names: Sequence[str],
    changed: Sequence[str],
    known: Mapping[tuple[int, ...], Callable[[Columns], Columns]],
    columns: Columns,
) -> Columns:
    result = {name: columns[name].copy() for name in changed}
    for codes, rows in _cases_of(names, columns):
        if codes in known:
            for name, values in known[codes]({name: column[rows] for name, column in columns.items()}).items():
                result[name][rows] = values
    return result


def _every_row(columns: Columns) -> BoolArray:
    return np.ones(next(iter(columns.values())).shape, dtype=np.bool_)
