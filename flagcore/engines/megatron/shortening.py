"""Shortens the steps of trials by running fewer micro-batches."""

from __future__ import annotations

import math

from flagcore.domain.candidate import Candidate
from flagcore.domain.spec import Task
from flagcore.engines.megatron.mesh_trials import plain_values
from flagcore.engines.megatron.rules import DP, PP

MIN_MICROBATCHES = 4
"""With fewer micro-batches, the fixed costs of a step would dominate its time."""

MICROBATCHES_PER_STAGE = 2
"""Micro-batches per stage that fill the pipeline, so that memory reaches its peak, in every schedule: 1F1B keeps 1 in
flight per stage, interleaved fewer than 2, and DualPipe requires 2 (deepseek-ai/DualPipe `dualpipe.py`)."""


def shorter_batch(task: Task, candidate: Candidate, share: float) -> int | None:
    """Return the smallest legal global batch of at least `share` of the task's; None if no smaller one is legal.

    The number of micro-batches is a multiple of the number of stages, which interleaved schedules need
    (megatron-core `schedules.py`).
    """
    values = plain_values(task, candidate)
    data, pipeline, micro_batch = (int(values.get(knob) or 1) for knob in (DP, PP, "micro_batch_size"))
    microbatches = task.spec.train.global_batch_size // (data * micro_batch)
    min_microbatches = max(MIN_MICROBATCHES, MICROBATCHES_PER_STAGE * pipeline, math.ceil(share * microbatches))
    count = math.ceil(min_microbatches / pipeline) * pipeline
    return count * data * micro_batch if count < microbatches else None
