"""Applies the effects of knobs: plugins' knobs, and engine settings that a space compares.

An engine is called without these knobs. The effect of a value changes settings of the task, or scales the predictions
of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.knob import WHOLE_STEP, Effect, Factor, Knob
from flagcore.domain.prediction import Predictions
from flagcore.domain.serving import LATENCIES, RATES
from flagcore.domain.space import Axis, Columns, FloatArray, IntArray, rows_by_codes
from flagcore.domain.spec import Spec, Task, TrainSpec


def has_user_command(spec: Spec) -> bool:
    """Return whether trials of `spec` run the user's training command, to which flags can be added."""
    return isinstance(spec.work, TrainSpec) and spec.work.command is not None


def plugin_axis(task: Task, knob: Knob) -> Axis:
    """Return the axis of a knob with effects: the values that the spec lists; for auto, those that trials can use."""
    listed, user_command = task.spec.space.get(knob.name, (knob.neutral,)), has_user_command(task.spec)
    if isinstance(listed, str):
        effects = knob.effects.items()
        usable = [value for value, effect in effects if not effect.no_launch_reason(user_command=user_command)]
        listed = tuple(dict.fromkeys((knob.neutral, *usable)))
    return knob.axis(listed, extra_values=knob.values)


def plugin_axes(task: Task) -> tuple[Axis, ...]:
    """Return the axes of a task's knobs with effects."""
    return tuple(plugin_axis(task, knob) for knob in task.knobs)


def engine_task(task: Task, effects: Sequence[Effect] = ()) -> Task:
    """Return the task for calling the engine: without knobs with effects, but with the settings of `effects`."""
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
    """Return the task for starting trials: only effects that the engine passes change its settings."""
    return engine_task(task, [effect for effect in effects if effect.passed])


def engine_candidate(task: Task, candidate: Candidate) -> Candidate:
    """Return `candidate` without the task's knobs with effects."""
    names = {knob.name for knob in task.knobs}
    return Candidate(tuple(item for item in candidate.items if item[0] not in names))


def effects_of(task: Task, values: Mapping[str, KnobValue]) -> list[Effect]:
    """Return the effects of a candidate's `values`. Neutral values have none."""
    effects = (knob.effect(values.get(knob.name, knob.neutral)) for knob in task.knobs)
    return [effect for effect in effects if effect is not None]


def environment_of(effects: Sequence[Effect]) -> dict[str, str]:
    """Return the environment variables that `effects` set."""
    return {name: value for effect in effects for name, value in effect.environment.items()}


def rows_by_effects(task: Task, columns: Columns) -> Iterator[tuple[list[Effect], Columns, IntArray]]:
    """Group rows by the values of the knobs with effects. Yield the effects, columns and row numbers of each group."""
    axes = plugin_axes(task)
    if not axes:
        yield [], columns, np.arange(len(next(iter(columns.values()), ())))
        return
    for codes, rows in rows_by_codes(columns, [axis.knob for axis in axes]):
        values = {axis.knob: axis.decode(code) for axis, code in zip(axes, codes, strict=True)}
        yield effects_of(task, values), {name: column[rows] for name, column in columns.items()}, rows


def plugin_columns(task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Return columns of one row for the task's knobs with effects."""
    axes = plugin_axes(task)
    return {axis.knob: np.array([axis.encode(values.get(axis.knob, axis.neutral))], dtype=np.int64) for axis in axes}


def effects_of_row(task: Task, columns: Columns) -> list[Effect]:
    """Return the effects of the first row of `columns`."""
    values = {axis.knob: axis.decode(int(columns[axis.knob][0])) for axis in plugin_axes(task)}
    return effects_of(task, values)


def with_flags(task: Task, effects: Sequence[Effect]) -> Task:
    """Return `task` with the flags of `effects` added to the user's command, if there is one."""
    flags, work = tuple(flag for effect in effects for flag in effect.flags), task.spec.work
    if not flags or not isinstance(work, TrainSpec) or work.command is None:
        return task
    return replace(task, spec=replace(task.spec, work=replace(work, flags=flags)))


def scaled(predictions: Predictions, effects: Sequence[Effect]) -> Predictions:
    """Return predictions, scaled by the factors of `effects`.

    The intervals are combined as for a product of independent figures: the squared widths of the logarithms are added.
    """
    for effect in effects:
        predictions = _scale_memory(_scale_time(predictions, effect.part, effect.time), effect.memory)
    return predictions


def _scale_time(predictions: Predictions, part: str, factor: Factor) -> Predictions:
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
        part_s = predictions.time_s.get(part, np.zeros_like(old_time))
        time_s = dict(predictions.time_s)
        if part in time_s:
            time_s[part] = part_s * factor.value
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
    """Return a figure of a server whose iterations take `factor` times as long."""
    if name in RATES:
        return values / factor.value
    return values * factor.value if name.partition(".")[0] in LATENCIES else values


def _scale_memory(predictions: Predictions, factor: Factor) -> Predictions:
    """Scale the peak of allocated memory. The difference is added to the activations."""
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
