"""shorten: run long steps with fewer micro-batches, and scale their times by predictions."""

from __future__ import annotations

import math
from collections.abc import Callable

from flagcore.contracts import StepShortener, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.effects import engine_candidate, engine_task
from flagcore.domain.spec import Task
from flagcore.domain.trial import Shortened

FIXED_FACTOR = 2.0
"""The uncertainty of the fixed part of a step (pipeline fill, gradient exchange, optimizer): its time is between
1/FIXED_FACTOR and FIXED_FACTOR times the predicted time. Chosen; docs/accuracy.md has errors of parts of a step."""

UNMODELLED_SHARE = 0.05
"""The share of a shortened step that unmodelled work may take, such as data loading, logging, or the host.
Chosen."""


def shorten(
    task: Task, workload: Workload, candidate: Candidate, step_s: float | None, predicted: Callable[[Task], float]
) -> Shortened | None:
    """Return how to shorten the steps of a candidate; None if they are short enough or cannot be shortened.

    `step_s` is the expected time of a step. `predicted` returns the predicted time of a step of a task.
    """
    max_step = task.spec.control.max_step_time
    if max_step is None or step_s is None or step_s <= max_step or not isinstance(workload, StepShortener):
        return None
    batch = workload.shorter_batch(engine_task(task), engine_candidate(task, candidate), max_step / step_s)
    if batch is None:
        return None
    whole_s, short_s = predicted(task), predicted(task.with_batch(batch))
    if not math.isfinite(whole_s / short_s) or whole_s <= short_s:
        return None
    return scale_steps(batch, task.spec.train.global_batch_size, short_s, whole_s)


def scale_steps(batch: int, whole_batch: int, short_s: float, whole_s: float) -> Shortened:
    """Return the scale from steps of `batch` samples to whole steps, from the predicted times of both.

    A step has a fixed part F and a part V that is proportional to the batch: t = F + V, T = F + (B/b) V. The measured t
    is scaled by T/t. The interval follows from the uncertainty of F: at most FIXED_FACTOR times as long, or longer by
    UNMODELLED_SHARE of the step, and at least 1/FIXED_FACTOR times as long.
    """
    ratio = whole_batch / batch
    variable = (whole_s - short_s) / (ratio - 1.0)
    fixed = max(short_s - variable, 0.0)
    bounds = (max(FIXED_FACTOR * fixed, fixed + UNMODELLED_SHARE * short_s), fixed / FIXED_FACTOR)
    low, high = ((bound + ratio * variable) / (bound + variable) for bound in bounds)
    return Shortened(global_batch_size=batch, whole=whole_batch, scale=whole_s / short_s, low=low, high=high)
