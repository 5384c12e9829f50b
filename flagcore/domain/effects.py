"""What the knobs with effects change, those of plugins and settings of the engine that a space compares: the task that
the engine sees, its candidates, its predictions.

Engines see only their own axes. The value of a knob with effects changes a task's settings, which the engine predicts,
or scales what the engine predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import WHOLE_STEP, Effect, Factor, Knob
from flagcore.domain.prediction import Predictions
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task, TrainSpec


def has_own_command(spec: Spec) -> bool:
    """Return whether trials of `spec` run a training command of the user's, to which flags can be added."""
    return isinstance(spec.work, TrainSpec) and spec.work.command is not None


def plugin_axis(task: Task, knob: Knob) -> Axis:
    """Return the axis of a plugin's knob: the values that the spec lists, those that trials can use for auto."""
    asked, own = task.spec.space.get(knob.name, (knob.neutral,)), has_own_command(task.spec)
    if isinstance(asked, str):
        usable = [value for value, effect in knob.effects.items() if not effect.no_launch_reason(own_command=own)]
        asked = tuple(dict.fromkeys((knob.neutral, *usable)))
    return knob.axis(asked, also=knob.values)


def plugin_axes(task: Task) -> tuple[Axis, ...]:
    """Return the axes of the plugins' knobs of a task."""
    return tuple(plugin_axis(task, knob) for knob in task.knobs)


def engine_task(task: Task, effects: Sequence[Effect] = ()) -> Task:
    """Return `task` as its engine sees it: without plugins' knobs, with the settings of some of their effects."""
    names = {knob.name for knob in task.knobs}
    spec, settings = task.spec, {key: value for effect in effects for key, value in effect.settings.items()}
    if names:
        space = {name: values for name, values in spec.space.items() if name not in names}
        baseline = spec.baseline and {name: value for name, value in spec.baseline.items() if name not in names}
        spec = replace(spec, space=space, baseline=baseline)
    if settings and isinstance(spec.work, TrainSpec):
        spec = replace(spec, work=replace(spec.work, settings={**spec.work.settings, **settings}))
    return task if spec is task.spec and not names else replace(task, spec=spec, knobs=())


def task_to_start(task: Task, effects: Sequence[Effect]) -> Task:
    """Return `task` as its engine starts trials of it: with the settings of those effects that it passes."""
    return engine_task(task, [effect for effect in effects if effect.passed])


def engine_candidate(task: Task, candidate: Candidate) -> Candidate:
    """Return `candidate` without the plugins' knobs."""
    names = {knob.name for knob in task.knobs}
    return Candidate(tuple(item for item in candidate.items if item[0] not in names))


def effects_of(task: Task, values: Mapping[str, KnobValue]) -> list[Effect]:
    """Return the effects of the plugins' knobs that a candidate's `values` do not leave neutral."""
    found = (knob.effect(values.get(knob.name, knob.neutral)) for knob in task.knobs)
    return [effect for effect in found if effect is not None]


def environment_of(effects: Sequence[Effect]) -> dict[str, str]:
    """Return the variables that effects set."""
    return {name: value for effect in effects for name, value in effect.environment.items()}


def rows_by_effects(task: Task, columns: Columns) -> Iterator[tuple[list[Effect], Columns, IntArray]]:
    """Yield, for each combination of the plugins' knobs, its effects, its columns and the rows that these are."""
    axes = plugin_axes(task)
    if not axes:
        yield [], columns, np.arange(len(next(iter(columns.values()), ())))
        return
    kinds, which = np.unique(np.stack([columns[axis.knob] for axis in axes]), axis=1, return_inverse=True)
    for place in range(kinds.shape[1]):
        rows = np.flatnonzero(which.reshape(-1) == place)
        values = {axis.knob: axis.decode(int(code)) for axis, code in zip(axes, kinds[:, place], strict=True)}
        yield effects_of(task, values), {name: column[rows] for name, column in columns.items()}, rows


def plugin_columns(task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Return columns of one row of the plugins' knobs."""
    axes = plugin_axes(task)
    return {axis.knob: np.array([axis.encode(values.get(axis.knob, axis.neutral))], dtype=np.int64) for axis in axes}


def effects_of_row(task: Task, columns: Columns) -> list[Effect]:
    """Return the effects of the first row."""
    values = {axis.knob: axis.decode(int(columns[axis.knob][0])) for axis in plugin_axes(task)}
    return effects_of(task, values)


def with_flags(task: Task, effects: Sequence[Effect]) -> Task:
    """Return `task` with the flags of effects for the user's own command."""
    flags, work = tuple(flag for effect in effects for flag in effect.flags), task.spec.work
    if not flags or not isinstance(work, TrainSpec) or work.command is None:
        return task
    return replace(task, spec=replace(task.spec, work=replace(work, flags=flags)))


def scaled(predictions: Predictions, effects: Sequence[Effect]) -> Predictions:
    """Return predictions with the factors of effects.

    The interval grows as that of a product of independent figures: the widths of logarithms add as squares.
    """
    for effect in effects:
        predictions = _scale_memory(_scale_time(predictions, effect.part, effect.time), effect.memory)
    return predictions


def _scale_time(found: Predictions, part: str, factor: Factor) -> Predictions:
    if factor == Factor():
        return found
    before = found.step_time_s
    if part == WHOLE_STEP:
        time_s = {name: seconds * factor.value for name, seconds in found.time_s.items()}
        after, ends = before * factor.value, (factor.low / factor.value, factor.high / factor.value)
        shares: tuple[FloatArray | float, FloatArray | float] = ends
        figures = {name: _scale_figure(name, each, factor) for name, each in found.figures.items()}
        found = replace(found, figures=figures)
    else:
        own = found.time_s.get(part, np.zeros_like(before))
        time_s = {**found.time_s, part: own * factor.value} if part in found.time_s else dict(found.time_s)
        after = before + own * (factor.value - 1.0)
        shares = ((before + own * (factor.low - 1.0)) / after, (before + own * (factor.high - 1.0)) / after)
    low, high = found.low_s / before, found.high_s / before
    return replace(
        found,
        step_time_s=after,
        low_s=after * np.exp(-np.hypot(np.log(low), np.log(shares[0]))),
        high_s=after * np.exp(np.hypot(np.log(high), np.log(shares[1]))),
        time_s=time_s,
    )


def _scale_figure(name: str, values: FloatArray, factor: Factor) -> FloatArray:
    """Return a figure of a server whose iterations all take `factor` times as long."""
    if name in RATES:
        return values / factor.value
    return values * factor.value if name.partition(".")[0] in LATENCIES else values


def _scale_memory(found: Predictions, factor: Factor) -> Predictions:
    """Scale the peak of allocated memory; the difference is one of activations."""
    if factor == Factor():
        return found
    more = found.peak_allocated_bytes * (factor.value - 1.0)
    return replace(
        found,
        activation_bytes=np.maximum(found.activation_bytes + more, 0.0),
        peak_allocated_bytes=found.peak_allocated_bytes + more,
        reserved_bytes=found.reserved_bytes + more,
        device_used_bytes=found.device_used_bytes + more,
    )
