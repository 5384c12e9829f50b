"""shorten: run a step of minutes with fewer micro-batches, and scale its time by the predictions of both."""

from __future__ import annotations

import math
from collections.abc import Callable

from flagcore.contracts import StepShortener, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.effects import engine_candidate, engine_task
from flagcore.domain.spec import Task
from flagcore.domain.trial import Shortened

FIXED = 2.0
"""What a step does once (pipeline fill, gradient exchange, optimizer) may take this many times what is predicted of
it, or that much less: the interval of the scaling."""

UNNAMED = 0.05
"""What no part of the model names (data, logging, the host) may take this share of a shortened step."""


def shorten(
    task: Task, workload: Workload, candidate: Candidate, step_s: float | None, predicted: Callable[[Task], float]
) -> Shortened | None:
    """Return how to shorten the steps of a candidate; None if they take less than `control.max_step_time` or cannot be.

    `step_s` are the seconds that a step is expected to take, `predicted` predicts it in a task with another batch.
    """
    most = task.spec.control.max_step_time
    if most is None or step_s is None or step_s <= most or not isinstance(workload, StepShortener):
        return None
    batch = workload.shorter_batch(engine_task(task), engine_candidate(task, candidate), most / step_s)
    if batch is None:
        return None
    whole, short = predicted(task), predicted(task.with_batch(batch))
    if not math.isfinite(whole / short) or whole <= short:
        return None
    return shortened(batch, task.spec.train.global_batch_size, short, whole)


def shortened(batch: int, whole_batch: int, short_s: float, whole_s: float) -> Shortened:
    """Return how steps of `batch` samples scale to whole ones, from the predicted seconds of both.

    A step has a fixed part F and one that is proportional to the batch: t = F + V, T = F + (B/b) V. The measured t
    scales by T/t, and the interval is that of F between 1/FIXED and FIXED times its predicted value, or what is UNNAMED
    more if that is larger.
    """
    more = whole_batch / batch
    variable = (whole_s - short_s) / (more - 1.0)
    fixed = max(short_s - variable, 0.0)
    bounds = (max(FIXED * fixed, fixed + UNNAMED * short_s), fixed / FIXED)
    low, high = ((once + more * variable) / (once + variable) for once in bounds)
    return Shortened(global_batch_size=batch, whole=whole_batch, scale=whole_s / short_s, low=low, high=high)
