"""What a job record of a server means that does not say: the settings of runs that were published, decided here alone.

- The cache is in 8 bits where the chip computes in 4 bits and the weights are narrower than 16: so the recipes of such
  chips have it, and the numbers of requests that published points could hold say so. On other chips it is in 16.
- SGLang looks for new requests every 30 iterations (InferenceMAX's recipes), not at each.
- An engine whose weights take more than four fifths of a device was given 95% of it: it ran.
- A release that is not told, or by a commit, is one of the time when such points were measured.
- All other settings: the engine's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.common.names import DP, PP, TP
from flagcore.engines.serving.common.place import Place
from flagcore.engines.serving.common.sizes import weight_bytes

CACHE_TYPE = "kv_cache_type"
NARROW: Mapping[str, str] = {"vllm": "fp8", "sglang": "fp8_e4m3"}
"""What each engine calls a cache in 8 bits."""

WIDE = ("bf16", "fp16", "fp32")

SHARE: Mapping[str, str] = {"vllm": "gpu-memory-utilization", "sglang": "mem-fraction-static"}
CROWDED, MOST = 0.8, 0.95
"""The share of a device that weights take from which on the engine was given more than by itself, and how much."""

RECEIVE = "scheduler-recv-interval"
RELEASE: Mapping[str, str] = {"vllm": "0.17.0", "sglang": "0.5.9"}


def published(task: Task, values: Mapping[str, KnobValue]) -> tuple[Task, dict[str, KnobValue]]:
    """Return the task and the knobs of a job record with all that it leaves out."""
    serve, chip = task.spec.serve, task.cluster.groups[0].chip
    values = dict(values)
    narrow = NARROW.get(serve.engine)
    if narrow and serve.precision not in WIDE and "fp4" in chip.dense_flops_per_second:
        values.setdefault(CACHE_TYPE, narrow)
    if serve.engine in RELEASE and not re.match(r"v?\d+\.\d+", serve.engine_version or ""):
        serve = replace(serve, engine_version=RELEASE[serve.engine])
    if serve.engine == "sglang":
        serve = replace(serve, engine_args={RECEIVE: 30, **serve.engine_args})
    if serve.engine in SHARE and _weights_share(task, values) > CROWDED:
        serve = replace(serve, engine_args={SHARE[serve.engine]: MOST, **serve.engine_args})
    return replace(task, spec=replace(task.spec, work=serve)), values


def _weights_share(task: Task, values: Mapping[str, KnobValue]) -> float:
    """Return the share of a device's memory that its part of the weights takes; NaN where nobody knows the memory."""
    sizes = [values.get(knob) for knob in (TP, PP, DP)]
    devices = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
    return weight_bytes(task) / devices / Place.of(task).memory_bytes
