"""What a job record of a server means that does not say: the settings of runs that were published, decided here alone.

- The cache is in 8 bits where the chip computes in 4 bits and the weights are narrower than 16: so the recipes of such
  chips have it, and the numbers of requests that published points could hold say so. On other chips it is in 16.
- SGLang looks for new requests every 30 iterations (InferenceMAX's recipes), not at each.
- A release that is not told, or by a commit, is the last that most such points were measured with.
- All other settings: the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Task

CACHE_TYPE = "kv_cache_type"
NARROW: Mapping[str, str] = {"vllm": "fp8", "sglang": "fp8_e4m3"}
"""What each engine calls a cache in 8 bits."""

WIDE = ("bf16", "fp16", "fp32")

RECEIVE = "scheduler-recv-interval"
RELEASE: Mapping[str, str] = {"vllm": "0.19.0", "sglang": "0.5.9"}


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
    return replace(task, spec=replace(task.spec, work=serve)), values
