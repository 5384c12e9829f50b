"""What a job record of a server means that does not say: the settings of runs that were published.

- The cache is in 8 bits where the chip computes in 4 bits and the weights are narrower than 16: so the recipes of such
  chips have it, and the numbers of requests that published points could hold say so. On other chips it is in 16.
- All other settings: the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.spec import Task

CACHE_TYPE: Mapping[str, tuple[str, str]] = {
    "vllm": ("kv_cache_type", "fp8"),
    "sglang": ("kv_cache_type", "fp8_e4m3"),
}
"""The knob of each engine that says what a value in the cache is, and its value for 8 bits."""

WIDE = ("bf16", "fp16", "fp32")


def published(task: Task, values: Mapping[str, KnobValue]) -> dict[str, KnobValue]:
    """Return the knobs of a job record with all that it leaves out."""
    serve, chip = task.spec.serve, task.cluster.groups[0].chip
    knob, narrow = CACHE_TYPE.get(serve.engine, ("", ""))
    values = dict(values)
    if knob and values.get(knob) is None and serve.precision not in WIDE and "fp4" in chip.dense_flops_per_second:
        values[knob] = narrow
    return values
