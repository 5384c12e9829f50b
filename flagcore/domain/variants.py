"""Rules and merges of an engine for spaces that compare settings.

Each combination of the compared settings, a variant, may have different rules and merges. They are combined into rules
and merges that depend on the compared settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from flagcore.domain.space import Axis, BoolArray, Columns, Merge, Rule, rows_by_codes
from flagcore.domain.spec import Task
from flagcore.errors import SpecError

MAX_COMBINATIONS = 4096
"""The maximum number of combinations of compared settings."""

T = TypeVar("T")
_RulesOf: TypeAlias = "Callable[[Task], tuple[Rule, ...]]"
_MergesOf: TypeAlias = "Callable[[Task], tuple[Merge, ...]]"
_Values: TypeAlias = "tuple[KnobValue, ...]"
_Cases: TypeAlias = "Mapping[_Values, T | None]"


@dataclass(frozen=True, slots=True)
class _Variant:
    """The rules by name and message, and the merges by name, for one combination of values.

    With an `error`, no candidate with these values is legal.
    """

    values: _Values
    rules: Mapping[tuple[str, str], Rule]
    merges: Mapping[str, Merge] = field(default_factory=dict)
    error: SpecError | None = None


def engine_legality(task: Task, rules_of: _RulesOf, merges_of: _MergesOf) -> tuple[tuple[Rule, ...], tuple[Merge, ...]]:
    """Return the engine's rules and merges for all candidates of a task.

    `rules_of` and `merges_of` return those of one variant. Raises SpecError for a value that is invalid in all
    combinations of settings, and for too many combinations.
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
    variant_task = engine_task(task, [effect for effect in effects if effect])
    try:
        rules = {(rule.name, rule.message): rule for rule in rules_of(variant_task)}
        return _Variant(values, rules, {merge.name: merge for merge in merges_of(variant_task)})
    except SpecError as error:
        name = error.key.rpartition(".")[2]
        rule = Rule(name=name, knobs=(), message=f"{name} {error.problem}", broken=_every_row)
        return _Variant(values, {(rule.name, rule.message): rule}, error=error)


def _require_possible(task: Task, knobs: Sequence[Knob], variants: Sequence[_Variant]) -> None:
    """Raise SpecError if no combination is legal, or none with a value that the space lists."""
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
    """Return one rule for all combinations. If it depends on one value, its name and message have that value."""
    rule = next(each for each in cases.values() if each)
    relevant, by_codes = _by_codes(axes, cases)
    if not relevant:
        return rule
    if len(relevant) == len(by_codes) == 1 and rule.name != relevant[0].knob:
        (axis,), ((code,),) = relevant, by_codes
        if code != axis.encode(axis.neutral):
            message = f"{axis.knob} = {axis.decode(code)}: {rule.message}"
            rule = replace(rule, name=f"{axis.knob}_{rule.name}", message=message)
    names = tuple(axis.knob for axis in relevant)
    broken = partial(_broken, names, {codes: each.broken for codes, each in by_codes.items()})
    return replace(rule, knobs=(*names, *rule.knobs), broken=broken)


def _merge(axes: Sequence[Axis], cases: _Cases[Merge]) -> Merge:
    """Return one merge for all combinations."""
    merge = next(each for each in cases.values() if each)
    relevant, by_codes = _by_codes(axes, cases)
    if not relevant:
        return merge
    names = tuple(axis.knob for axis in relevant)
    canonical = partial(_canonical, names, merge.knobs, {codes: each.canonical for codes, each in by_codes.items()})
    return replace(merge, knobs=(*names, *merge.knobs), canonical=canonical)


def _by_codes(axes: Sequence[Axis], cases: _Cases[T]) -> tuple[list[Axis], dict[tuple[int, ...], T]]:
    """Return the axes on which a rule or merge depends, and the rule or merge for each combination of their codes."""
    relevant = _relevant_axes(axes, cases)
    codes = {values: tuple(axes[index].encode(values[index]) for index in relevant) for values in cases}
    return [axes[index] for index in relevant], {codes[values]: each for values, each in cases.items() if each}


def _relevant_axes(axes: Sequence[Axis], cases: _Cases[T]) -> list[int]:
    """Return the indices of the axes on which a rule or merge depends."""
    relevant = []
    for index in range(len(axes)):
        first: dict[_Values, T | None] = {}
        for values, each in cases.items():
            if not _are_equal(first.setdefault(values[:index] + values[index + 1 :], each), each):
                relevant.append(index)
                break
    return relevant


def _are_equal(first: object, second: object) -> bool:
    """Return whether two rules, merges, functions or values are equal.

    Functions are equal if they have the same code and equal closures.
    """
    if isinstance(first, (Rule, Merge)) and isinstance(second, (Rule, Merge)):
        functions = [each.broken if isinstance(each, Rule) else each.canonical for each in (first, second)]
        return _are_equal(*functions)
    if isinstance(first, MethodType) and isinstance(second, MethodType):
        return first.__func__ is second.__func__ and bool(first.__self__ == second.__self__)
    if isinstance(first, FunctionType) and isinstance(second, FunctionType):
        cells = zip(first.__closure__ or (), second.__closure__ or (), strict=False)
        return first.__code__ is second.__code__ and all(_are_equal(a.cell_contents, b.cell_contents) for a, b in cells)
    return first is second or (type(first) is type(second) and bool(first == second))


def _broken(
    names: Sequence[str], by_codes: Mapping[tuple[int, ...], Callable[[Columns], BoolArray]], columns: Columns
) -> BoolArray:
    result = np.zeros(columns[names[0]].shape, dtype=np.bool_)
    for codes, rows in rows_by_codes(columns, names):
        if codes in by_codes:
            result[rows] = by_codes[codes]({name: column[rows] for name, column in columns.items()})
    return result


def _canonical(
    names: Sequence[str],
    changed: Sequence[str],
    by_codes: Mapping[tuple[int, ...], Callable[[Columns], Columns]],
    columns: Columns,
) -> Columns:
    result = {name: columns[name].copy() for name in changed}
    for codes, rows in rows_by_codes(columns, names):
        if codes in by_codes:
            for name, values in by_codes[codes]({name: column[rows] for name, column in columns.items()}).items():
                result[name][rows] = values
    return result


def _every_row(columns: Columns) -> BoolArray:
    return np.ones(next(iter(columns.values())).shape, dtype=np.bool_)
