"""Job records of published runs, completed with the settings that they leave out.

- The cache is in 8 bits if the chip computes in 4 bits and the weights are narrower than 16: the recipes of such chips
  have it, and the numbers of requests that published points could hold confirm it. On other chips it is in 16.
- An engine whose weights take more than four fifths of a device was given 95% of it: it ran.
- A release that is missing, or is a commit, is one of the time when such points were measured.
- All other settings: `PublishedRuns` of the engine, then the engine's own defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.common.hardware import Hardware
from flagcore.engines.serving.common.knobs import count
from flagcore.engines.serving.common.names import DP, PP, TP
from flagcore.engines.serving.common.sizes import weight_bytes
from flagcore.engines.serving.engine import PublishedRuns

CACHE_TYPE = "kv_cache_type"
WIDE = ("bf16", "fp16", "fp32")
CROWDED, RAISED = 0.8, 0.95
"""The share of a device that weights take above which the engine's share of memory was raised, and to what."""


def published(task: Task, values: Mapping[str, KnobValue], runs: PublishedRuns) -> tuple[Task, dict[str, KnobValue]]:
    """Return the task and the knobs of a job record with all that it leaves out."""
    serve, chip = task.spec.serve, task.cluster.groups[0].chip
    values = dict(values)
    if runs.cache_type and serve.precision not in WIDE and "fp4" in chip.dense_flops_per_second:
        values.setdefault(CACHE_TYPE, runs.cache_type)
    if runs.release and not re.match(r"v?\d+\.\d+", serve.engine_version or ""):
        serve = replace(serve, engine_version=runs.release)
    serve = replace(serve, engine_args={**runs.engine_args, **serve.engine_args})
    if runs.memory_flag and _weights_share(task, values) > CROWDED:
        serve = replace(serve, engine_args={runs.memory_flag: RAISED, **serve.engine_args})
    return replace(task, spec=replace(task.spec, work=serve)), values


def _weights_share(task: Task, values: Mapping[str, KnobValue]) -> float:
    """Return the share of a device's memory that its part of the weights takes; NaN if the memory is unknown."""
    devices = math.prod(count(values, knob) for knob in (TP, PP, DP))
    return weight_bytes(task) / devices / Hardware.of(task).memory_bytes
