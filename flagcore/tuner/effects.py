"""Applies the effects of knobs that the engine does not handle: plugins' knobs, and settings that a space compares.

The engine is called without these knobs. The effect of a value changes settings of the task, or scales the engine's
predictions. A combination of values of the compared settings is called a variant. The engine may have different rules
and merges for each variant. They are combined into rules and merges that depend on the compared settings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from types import FunctionType, MethodType
from typing import TypeAlias, TypeVar

import numpy as np

from flagcore.domain.knob import WHOLE_STEP, Effect, Factor, Knob
from flagcore.domain.metrics import LATENCIES, RATES
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import (
    Axis,
    BoolArray,
    Candidate,
    Columns,
    FloatArray,
    IntArray,
    KnobValue,
    Merge,
    Rule,
    rows_by_codes,
)
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import Message


def plugin_axis(task: Task, knob: Knob) -> Axis:
    """Return the axis of a knob whose values have an `Effect`.

    The axis has the values that the spec lists. `auto` means all values that trials can use.
    """
    listed, user_command = task.spec.space.get(knob.name, (knob.neutral,)), task.spec.work.starts_itself
    if isinstance(listed, str):
        effects = knob.effects.items()
        usable = [value for value, effect in effects if not effect.no_launch_reason(user_command=user_command)]
        listed = tuple(dict.fromkeys((knob.neutral, *usable)))
    return knob.axis(listed, extra_values=knob.values)


def plugin_axes(task: Task) -> tuple[Axis, ...]:
    """Return the axes of the task's knobs whose values have an `Effect`."""
    return tuple(plugin_axis(task, knob) for knob in task.knobs)


def task_to_start(task: Task, effects: Sequence[Effect]) -> Task:
    """Return the task that trials run. It has the settings of those `effects` that are passed to the engine."""
    return task.for_engine([effect for effect in effects if effect.passed])


def engine_candidate(task: Task, candidate: Candidate) -> Candidate:
    """Return `candidate` without the knobs whose values have an `Effect`, because the engine does not know them."""
    names = {knob.name for knob in task.knobs}
    return Candidate(tuple(item for item in candidate.items if item[0] not in names))


def effects_of(task: Task, values: Mapping[str, KnobValue]) -> list[Effect]:
    """Return the effects of a candidate's `values`. Values without an effect, such as neutral ones, are skipped."""
    effects = (knob.effect(values.get(knob.name, knob.neutral)) for knob in task.knobs)
    return [effect for effect in effects if effect is not None]


def environment_of(effects: Sequence[Effect]) -> dict[str, str]:
    """Return the environment variables that `effects` set."""
    return {name: value for effect in effects for name, value in effect.environment.items()}


def rows_by_effects(task: Task, columns: Columns) -> Iterator[tuple[list[Effect], Columns, IntArray]]:
    """Group the candidates in `columns` by their values of the knobs that have an `Effect`.

    Yields, for each group, the effects of the values, the columns of the candidates, and the row numbers of the
    candidates in `columns`.
    """
    axes = plugin_axes(task)
    if not axes:
        yield [], columns, np.arange(len(next(iter(columns.values()), ())))
        return
    for codes, rows in rows_by_codes(columns, [axis.knob for axis in axes]):
        values = {axis.knob: axis.decode(code) for axis, code in zip(axes, codes, strict=True)}
        yield effects_of(task, values), {name: column[rows] for name, column in columns.items()}, rows


def plugin_columns(task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Encode one candidate's `values` of the knobs that have an `Effect` as columns with one row."""
    axes = plugin_axes(task)
    return {axis.knob: np.array([axis.encode(values.get(axis.knob, axis.neutral))], dtype=np.int64) for axis in axes}


def effects_of_row(task: Task, columns: Columns) -> list[Effect]:
    """Return the effects of the first row of `columns`."""
    return effects_of(task, {axis.knob: axis.decode(int(columns[axis.knob][0])) for axis in plugin_axes(task)})


def with_flags(task: Task, effects: Sequence[Effect]) -> Task:
    """Return `task` with the flags of `effects` added to the user's command, if there is one."""
    flags, work = tuple(flag for effect in effects for flag in effect.flags), task.spec.work
    if not flags or not work.starts_itself:
        return task
    return replace(task, spec=replace(task.spec, work=work.with_flags(flags)))


def scaled(predictions: Predictions, effects: Sequence[Effect]) -> Predictions:
    """Return predictions scaled by the factors of `effects`.

    The intervals of a prediction and a factor are combined as for a product of independent quantities: the squared
    widths of their logarithms are added.
    """
    for effect in effects:
        predictions = _scale_memory(_scale_time(predictions, effect.part, effect.time), effect.memory)
    return predictions


def _scale_time(predictions: Predictions, part: str, factor: Factor) -> Predictions:
    """Scale the time of the parts of the step in `part`, or of the step, by `factor`, and widen the 80% intervals."""
    if factor == Factor():
        return predictions
    old_time = predictions.step_time_s
    if part == WHOLE_STEP:
        time_s = {name: seconds * factor.value for name, seconds in predictions.time_s.items()}
        new_time, bounds = old_time * factor.value, (factor.low / factor.value, factor.high / factor.value)
        shares: tuple[FloatArray | float, FloatArray | float] = bounds
        figures = {name: _scale_figure(name, each, factor) for name, each in predictions.figures.items()}
        predictions = replace(predictions, figures=figures)
    else:
        scaled_s = {name: predictions.time_s[name] for name in part.split() if name in predictions.time_s}
        part_s = sum(scaled_s.values(), np.zeros_like(old_time))
        time_s = {**predictions.time_s, **{name: seconds * factor.value for name, seconds in scaled_s.items()}}
        new_time = old_time + part_s * (factor.value - 1.0)
        shares = (
            (old_time + part_s * (factor.low - 1.0)) / new_time,
            (old_time + part_s * (factor.high - 1.0)) / new_time,
        )
    low, high = predictions.low_s / old_time, predictions.high_s / old_time
    return replace(
        predictions,
        step_time_s=new_time,
        low_s=new_time * np.exp(-np.hypot(np.log(low), np.log(shares[0]))),
        high_s=new_time * np.exp(np.hypot(np.log(high), np.log(shares[1]))),
        time_s=time_s,
    )


def _scale_figure(name: str, values: FloatArray, factor: Factor) -> FloatArray:
    """Return the values of a server's metric if iterations take `factor` times as long.

    Rates are divided by the factor, latencies are multiplied by it, and other metrics are unchanged.
    """
    if name in RATES:
        return values / factor.value
    return values * factor.value if name.partition(".")[0] in LATENCIES else values


def _scale_memory(predictions: Predictions, factor: Factor) -> Predictions:
    """Scale the peak of allocated memory by `factor`. The additional bytes count as activations."""
    if factor == Factor():
        return predictions
    added_bytes = predictions.peak_allocated_bytes * (factor.value - 1.0)
    return replace(
        predictions,
        activation_bytes=np.maximum(predictions.activation_bytes + added_bytes, 0.0),
        peak_allocated_bytes=predictions.peak_allocated_bytes + added_bytes,
        reserved_bytes=predictions.reserved_bytes + added_bytes,
        device_used_bytes=predictions.device_used_bytes + added_bytes,
    )


MAX_COMBINATIONS = 4096
"""The maximum number of variants of a task."""

T = TypeVar("T")
_RulesOf: TypeAlias = Callable[[Task], tuple[Rule, ...]]
_MergesOf: TypeAlias = Callable[[Task], tuple[Merge, ...]]
_Values: TypeAlias = tuple[KnobValue, ...]
_Cases: TypeAlias = Mapping[_Values, T | None]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The engine's rules and merges for one combination of values of the knobs that have an `Effect`.

    `rules` are keyed by name and message, `merges` by name. If `error` is set, no candidate with `values` is legal.
    """

    values: _Values
    rules: Mapping[tuple[str, str], Rule]
    merges: Mapping[str, Merge] = field(default_factory=dict)
    error: SpecError | None = None


def engine_legality(task: Task, rules_of: _RulesOf, merges_of: _MergesOf) -> tuple[tuple[Rule, ...], tuple[Merge, ...]]:
    """Return the engine's rules and merges for all candidates of a task.

    `rules_of` and `merges_of`: functions that return the rules and the merges of a task.
    They are called for each combination of the values that have an `Effect`. Raises SpecError if a value is invalid in
    all combinations, or if there are more than MAX_COMBINATIONS.
    """
    knobs = [knob for knob in task.knobs if any(effect.settings for effect in knob.effects.values())]
    if not knobs:
        return rules_of(task.for_engine()), merges_of(task.for_engine())
    if (count := prod(len(knob.values) for knob in knobs)) > MAX_COMBINATIONS:
        problem = f"compares {count:,} combinations of settings, of at most {MAX_COMBINATIONS:,}"
        raise SpecError(key="auto_tuner.space", problem=problem, fix="give shorter lists")
    variants = [
        _variant(task, rules_of, merges_of, knobs, values) for values in product(*(knob.values for knob in knobs))
    ]
    _require_possible(task, knobs, variants)
    axes = [plugin_axis(task, knob) for knob in knobs]
    return _joined_rules(axes, variants), _joined_merges(axes, variants)


def _joined_rules(axes: Sequence[Axis], variants: Sequence[_Variant]) -> tuple[Rule, ...]:
    """Return the rules of all variants. One that several variants have is one rule."""
    rules = []
    for key in dict.fromkeys(key for each in variants for key in each.rules):
        cases = {each.values: each.rules.get(key) for each in variants if each.error is None or key in each.rules}
        rules.append(_rule(axes, cases))
    return tuple(rules)


def _joined_merges(axes: Sequence[Axis], variants: Sequence[_Variant]) -> tuple[Merge, ...]:
    """Return the merges of all legal variants. One that several variants have is one merge."""
    legal = [each for each in variants if each.error is None]
    names = dict.fromkeys(name for each in legal for name in each.merges)
    return tuple(_merge(axes, {each.values: each.merges.get(name) for each in legal}) for name in names)


def _variant(task: Task, rules_of: _RulesOf, merges_of: _MergesOf, knobs: Sequence[Knob], values: _Values) -> _Variant:
    effects = [knob.effect(value) for knob, value in zip(knobs, values, strict=True)]
    variant_task = task.for_engine([effect for effect in effects if effect])
    try:
        rules = {(rule.name, rule.message): rule for rule in rules_of(variant_task)}
        return _Variant(values, rules, {merge.name: merge for merge in merges_of(variant_task)})
    except SpecError as error:
        name, broken = error.key.rpartition(".")[2], lambda c: np.ones(next(iter(c.values())).shape, dtype=np.bool_)
        rule = Rule(name=name, knobs=(), message=f"{name} {error.problem}", broken=broken)
        return _Variant(values, {(rule.name, rule.message): rule}, error=error)


def _require_possible(task: Task, knobs: Sequence[Knob], variants: Sequence[_Variant]) -> None:
    """Raise SpecError if no combination of values is legal, or if a listed value is in no legal combination."""
    errors = [each.error for each in variants if each.error]
    if len(errors) == len(variants):
        raise errors[0]
    for place, knob in enumerate(knobs):
        listed = task.spec.space.get(knob.name, ())
        for value in () if isinstance(listed, str) else listed:
            value_errors = [each.error for each in variants if each.values[place] == value]
            if all(value_errors) and value_errors[0]:
                key = f"auto_tuner.space.{knob.name}"
                raise SpecError(key=key, value=value, problem=f"is not possible: {value_errors[0]}")


def _rule(axes: Sequence[Axis], cases: _Cases[Rule]) -> Rule:
    """Return one rule for all combinations of compared values, from the rule for each combination in `cases`.

    If the rule exists for only one value of one knob, its name and message include the knob and the value.
    """
    rule = next(each for each in cases.values() if each)
    names, by_codes = _by_codes(axes, cases)
    if not names:
        return rule
    if len(names) == len(by_codes) == 1 and rule.name != names[0]:
        axis, ((code,),) = next(axis for axis in axes if axis.knob == names[0]), by_codes
        if code != axis.encode(axis.neutral):
            message = Message(
                "{knob} = {value}: {reason}", knob=axis.knob, value=axis.decode(code), reason=rule.message
            )
            rule = replace(rule, name=f"{axis.knob}_{rule.name}", message=message)

    def broken(columns: Columns) -> BoolArray:
        result = np.zeros(columns[names[0]].shape, dtype=np.bool_)
        for each, rows, part in _cases_of(columns, names, by_codes):
            result[rows] = each.broken(part)
        return result

    return replace(rule, knobs=(*names, *rule.knobs), broken=broken)


def _merge(axes: Sequence[Axis], cases: _Cases[Merge]) -> Merge:
    """Return one merge for all combinations of compared values, from the merge for each combination in `cases`."""
    merge = next(each for each in cases.values() if each)
    names, by_codes = _by_codes(axes, cases)
    if not names:
        return merge

    def canonical(columns: Columns) -> Columns:
        result = {name: columns[name].copy() for name in merge.knobs}
        for each, rows, part in _cases_of(columns, names, by_codes):
            for name, values in each.canonical(part).items():
                result[name][rows] = values
        return result

    return replace(merge, knobs=(*names, *merge.knobs), canonical=canonical)


def _by_codes(axes: Sequence[Axis], cases: _Cases[T]) -> tuple[tuple[str, ...], dict[tuple[int, ...], T]]:
    """Return the knobs on which a rule or merge depends, and the rule or merge for each combination of their codes."""
    relevant = _relevant_axes(axes, cases)
    codes = {values: tuple(axes[index].encode(values[index]) for index in relevant) for values in cases}
    by_codes = {codes[values]: each for values, each in cases.items() if each}
    return tuple(axes[index].knob for index in relevant), by_codes


def _cases_of(
    columns: Columns, names: Sequence[str], by_codes: Mapping[tuple[int, ...], T]
) -> Iterator[tuple[T, IntArray, Columns]]:
    """Yield each rule or merge, the row numbers of the candidates to which it applies, and their columns."""
    for codes, rows in rows_by_codes(columns, names):
        if codes in by_codes:
            yield by_codes[codes], rows, {name: column[rows] for name, column in columns.items()}


def _relevant_axes(axes: Sequence[Axis], cases: _Cases[T]) -> list[int]:
    """Return the indices of the axes on which the rules or merges in `cases` depend."""
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
    if first is second or type(first) is not type(second):
        return first is second
    match first, second:
        case Rule(), Rule():
            return _are_equal(first.broken, second.broken)
        case Merge(), Merge():
            return _are_equal(first.canonical, second.canonical)
        case MethodType(), MethodType():
            return first.__func__ is second.__func__ and bool(first.__self__ == second.__self__)
        case FunctionType(), FunctionType():
            cells = zip(first.__closure__ or (), second.__closure__ or (), strict=False)
            equal_cells = (_are_equal(a.cell_contents, b.cell_contents) for a, b in cells)
            return first.__code__ is second.__code__ and all(equal_cells)
    return bool(first == second)
