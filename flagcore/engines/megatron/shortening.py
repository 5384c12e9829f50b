"""Steps with fewer micro-batches."""

from __future__ import annotations

import math

from flagcore.domain.candidate import Candidate
from flagcore.domain.spec import Task
from flagcore.engines.megatron.rules import DP, PP

FEWEST_MICROBATCHES = 4
"""Below these a step measures more of what happens once than of its micro-batches."""

FILLS = 2
"""Micro-batches a stage that bring the pipeline to its steady state, and memory to its peak, in every schedule: 1F1B
keeps 1 of them in flight a stage, interleaved below 2, and DualPipe requires 2 (deepseek-ai/DualPipe `dualpipe.py`)."""


def shorter_batch(task: Task, candidate: Candidate, share: float) -> int | None:
    """Return the smallest legal global batch of at least `share` of the task's; None if all are as large.

    Interleaved schedules need multiples of the pipeline's size (megatron-core `schedules.py`); all get them.
    """
    values = candidate.as_dict()
    data, pipeline, micro_batch = (int(values.get(knob) or 1) for knob in (DP, PP, "micro_batch_size"))
    microbatches = task.spec.train.global_batch_size // (data * micro_batch)
    fewest = max(FEWEST_MICROBATCHES, FILLS * pipeline, math.ceil(share * microbatches))
    count = math.ceil(fewest / pipeline) * pipeline
    return count * data * micro_batch if count < microbatches else None
