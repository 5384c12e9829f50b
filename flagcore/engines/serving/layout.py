"""The default search space, and the configuration that an expert would start. Both use all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Columns
from flagcore.domain.spec import AUTO, Task
from flagcore.engines.serving.common.hardware import DP, EP, INSTANCES, PP, TP, Hardware
from flagcore.engines.serving.common.knobs import CONTEXT, LAYOUT, tensor_sizes

CACHE_SHARE = 0.25
"""Share of the memory in use that an expert reserves for the cache. With less, an instance gets more devices."""


def usual_space(
    task: Task, knobs: Sequence[Knob], defaults: Mapping[str, KnobValue], fixed: Mapping[str, KnobValue]
) -> dict[str, str | tuple[KnobValue, ...]]:
    """Return the layouts among which an expert chooses, with the engine's defaults for all other knobs.

    The layouts are those of the spec's space; without a space, all that do not split a matrix over several nodes. On
    CPU cores the engine's defaults are the only choice: one instance uses all of them.
    """
    space, node = task.spec.space, max(group.devices_per_node for group in task.cluster.groups)
    usual: dict[str, str | tuple[KnobValue, ...]] = {name: (value,) for name, value in defaults.items()}
    if task.spec.serve.default_space and CONTEXT in usual and CONTEXT not in fixed:
        usual[CONTEXT] = AUTO
    if Hardware.of(task).on_cores:
        return usual
    for knob in (knob for knob in knobs if knob.name in LAYOUT and knob.name not in fixed):
        named = knob.value_in(space)
        if named is not None:
            usual[knob.name] = named
        elif task.spec.serve.default_space:
            usual[knob.name] = tuple(size for size in tensor_sizes(task) if size <= node) if knob.name == TP else AUTO
    return usual


def rule_of_thumb(columns: Columns, predictions: Predictions, split_by: str) -> int:
    """Return the row that uses the most devices, then one with enough memory for the cache, then the one with the
    fewest devices per instance.

    Ties prefer fewer attention and expert groups, and splits by the knob `split_by` only.
    """
    one = np.ones_like(predictions.worst_stage)
    sizes = {knob: np.maximum(columns.get(knob, one), 1) for knob in LAYOUT}
    used = sizes[INSTANCES] * sizes[TP] * sizes[PP] * sizes[DP]
    cache = predictions.figures["kv_cache_gib"] * 2.0**30
    crowded = ~(cache >= CACHE_SHARE * predictions.device_used_bytes)
    other = sizes[PP if split_by == TP else TP]
    return int(np.lexsort((sizes[split_by], other, sizes[EP], sizes[DP], crowded, -used))[0])
