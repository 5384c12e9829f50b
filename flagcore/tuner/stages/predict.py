"""predict: predict memory and time of all candidates of a space, in chunks."""

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection

import numpy as np

from flagcore.contracts import Platform
from flagcore.domain.knob import Effect, Factor
from flagcore.domain.metrics import PER_DEVICE
from flagcore.domain.plan import cost_figures
from flagcore.domain.prediction import BadPredictions, Interval, Prediction, Predictions, part_name
from flagcore.domain.space import Columns, FloatArray, IntArray, Space
from flagcore.domain.spec import Task, objective_value
from flagcore.errors import NoDevice
from flagcore.i18n import _
from flagcore.loading.entry_points import stdout_to_stderr
from flagcore.tuner.effects import rows_by_effects, scaled

CHUNK = 1 << 17

LIMIT_SHARE = 0.1
"""The largest part of a step, other than compute, is the bottleneck if it takes at least this share of the step."""
FULL_SHARE = 0.9
"""If no part of the step is the bottleneck, memory is, if at least this share of the capacity is in use."""


FORK_ROWS = 1 << 12
"""The fewest rows of a process. A fork costs as much as about a tenth of them."""


def predict(platform: Platform, space: Space, *, rough: bool = False) -> Predictions:
    """Return the predictions of all candidates in the order of the space's rows. `rough`: those of `Engine.rough`.

    Each processor predicts a share of a large space in a fork. A process with threads, other than timers, does not
    fork, because a lock that another thread holds would stay locked in the fork. A daemonic process may not fork.
    """
    others = [each for each in threading.enumerate() if not isinstance(each, threading.Timer)][1:]
    may_fork = sys.platform == "linux" and not others and not current_process().daemon
    processors = len(os.sched_getaffinity(0)) if may_fork else 1
    workers = max(min(processors, len(space) // FORK_ROWS), 1)
    pieces = list(space.chunks(min(CHUNK, -(-len(space) // workers)))) or [slice(0, 0)]

    def predicted(some: Iterable[slice]) -> Iterator[Predictions]:
        return (predict_columns(platform, space.columns(rows), rough=rough) for rows in some)

    with ExitStack() as stack:
        forks = [stack.enter_context(_forked(predicted(pieces[start::workers]))) for start in range(1, workers)]
        streams = (forks[number % workers - 1] if number % workers else None for number in range(len(pieces)))
        parts = (_received(stream) or next(predicted([rows])) for stream, rows in zip(streams, pieces, strict=True))
        return Predictions.join(parts, len(space))


@contextmanager
def _forked(parts: Iterable[Predictions]) -> Iterator[Connection]:
    """Compute `parts` in a fork. Yield a connection that receives them, up to the first that fails."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(parts, sender), daemon=True)
    process.start()
    sender.close()
    try:
        yield receiver
    finally:
        process.kill()  # all its parts were received, or the prediction has failed
        process.join()
        receiver.close()


def _send(parts: Iterable[Predictions], sender: Connection) -> None:
    with suppress(BaseException):  # the parent computes what does not arrive, and reports errors and interrupts
        logging.disable()
        for part in parts:
            sender.send(part)


def _received(connection: Connection | None) -> Predictions | None:
    """Return the next part from a fork, None if there is no fork or no further part."""
    with suppress(EOFError, OSError):
        return None if connection is None else connection.recv()
    return None


def predict_columns(platform: Platform, columns: Columns, *, rough: bool = False) -> Predictions:
    """Return the predictions for all rows of `columns`: the engine's, with the effects of the task's knobs.

    Settings that the engine does not model widen the intervals.
    """
    task, parts, order = platform.task, [], []
    uncertain = [Effect(time=Factor(low=low, high=high)) for low, high in (each.time for each in platform.unmodelled)]
    for effects, group_columns, rows in rows_by_effects(task, columns):
        found = _predicted(platform, task.for_engine(effects), group_columns, rough=rough)
        parts.append(scaled(found, [*effects, *uncertain]))
        order.append(rows)
    if len(parts) <= 1:
        return parts[0] if parts else _predicted(platform, task.for_engine(), columns, rough=rough)
    original_order: IntArray = np.argsort(np.concatenate(order), kind="stable").astype(np.int64)
    return Predictions.join(parts).take(original_order)


def _predicted(platform: Platform, task: Task, columns: Columns, *, rough: bool) -> Predictions:
    """Return the predictions of the engine. Raises NoDevice if they are not one number per candidate."""
    engine, rows = platform.engine, next((column.size for column in columns.values()), 0)
    try:
        with stdout_to_stderr():  # once for all calls of plugins
            found = (engine.rough if rough else engine.predict)(task, columns, platform.costs)
        if not isinstance(found, Predictions):
            raise BadPredictions(f"predict returned {type(found).__name__}, not Predictions")
        if columns and found.step_time_s.size != rows:
            raise BadPredictions(f"predict returned {found.step_time_s.size} numbers for {rows} candidates")
    except BadPredictions as error:
        raise NoDevice(_("the engine {engine} cannot be used: {why}", engine=engine.name, why=error)) from error
    return found


def predict_components(platform: Platform, columns: Columns, stages: IntArray) -> dict[str, dict[str, FloatArray]]:
    """Return the metrics of each component of the model, with one value per row.

    `stages`: for each row, the pipeline stage whose metrics are returned. Factors of knobs' effects are not applied.
    """
    figures_by_component: dict[str, dict[str, FloatArray]] = {}
    for effects, group_columns, rows in rows_by_effects(platform.task, columns):
        task = platform.task.for_engine(effects)
        components = platform.engine.plans.components(task, group_columns, stages[rows], platform.costs)
        for component, figures in components.items():
            for name, values in figures.items():
                figures_by_component.setdefault(component, {}).setdefault(name, np.zeros(stages.size))[rows] = values
    return figures_by_component


def predict_stage_layers(platform: Platform, columns: Columns) -> dict[int, Sequence[int]]:
    """Return the number of layers of each pipeline stage, by row, for rows whose layer split the engine chooses."""
    layers_by_row = {}
    for effects, group_columns, rows in rows_by_effects(platform.task, columns):
        layers = platform.engine.plans.stage_layers(platform.task.for_engine(effects), group_columns, platform.costs)
        layers_by_row.update({int(row): each for row, each in zip(rows, layers, strict=False) if each})
    return layers_by_row


def limit(prediction: Prediction) -> str:
    """Return the bottleneck of a candidate with a known time: a part of its step, memory, or compute."""
    parts = {name: seconds for name, seconds in prediction.time_s.items() if name != "compute_s"}
    largest = max(parts, key=lambda name: parts[name], default=None)
    if largest is not None and parts[largest] >= LIMIT_SHARE * (prediction.step_time_s or 0.0):
        return part_name(largest)
    full = FULL_SHARE * (prediction.capacity_bytes or float("inf"))
    return "memory" if prediction.device_used_bytes >= full else "compute"


def with_figures(task: Task, prediction: Prediction, layers: Sequence[int] = ()) -> Prediction:
    """Return a prediction with the figures that follow from the task: rates, costs, the objective, the bottleneck.

    `layers`: the number of layers of each pipeline stage, if the engine chose the split.
    """
    step, work, flops = prediction.step, task.spec.work, prediction.model_flops
    prediction = replace(prediction, model_flops=0.0, stage_layers=tuple(layers))
    if step is None:
        return prediction
    if not work.has_steps:
        objective = task.spec.objective
        bounds = sorted((objective_value(objective, step.low), objective_value(objective, step.high)))
        costs = cost_figures(task, step.value, prediction.figures.get(PER_DEVICE))
        return replace(prediction, objective=Interval(objective_value(objective, step.value), *bounds), costs=costs)
    devices, peak = task.cluster.devices, task.cluster.peak_flops(work.precision)
    tokens = work.step_tokens / devices
    rate = flops / step.value / devices
    return replace(
        prediction,
        tokens_per_second_per_device=Interval(tokens / step.value, tokens / step.high, tokens / step.low),
        costs=cost_figures(task, step.value, tokens / step.value),
        model_tflops_per_device=rate / 1e12,
        mfu=rate / peak if peak else None,
        limit=limit(prediction),
    )
