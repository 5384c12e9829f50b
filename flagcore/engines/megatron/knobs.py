"""The knobs of Megatron training: their values, codes and defaults.

The names are the keys of a spec's `space` and of `candidate` in job records.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.space import Axis, IntArray
from flagcore.domain.spec import AUTO, Task
from flagcore.errors import SpecError

RECOMPUTE_GRANULARITY = (None, "selective", "full")
RECOMPUTE_METHOD = (None, "uniform", "block")
SELECTIVE, FULL = 1, 2
UNIFORM, BLOCK = 1, 2

WORDS: Mapping[str, tuple[str | None, ...]] = {
    "recompute_granularity": RECOMPUTE_GRANULARITY,
    "recompute_method": RECOMPUTE_METHOD,
}
FLAGS = ("use_distributed_optimizer", "sequence_parallel", "use_recompute")
OPTIONAL = ("num_layers_per_virtual_pipeline_stage", "recompute_num_layers", *WORDS)
"""Knobs whose neutral value is None: the engine is not told of them."""

KNOBS = (
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "num_layers_per_virtual_pipeline_stage",
    "use_recompute",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)
"""The thirteen knobs in the order in which they are crossed: those that rules tie together come first."""

JOB_KNOBS = (
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
"""Further knobs of job records, all with 0 for not given."""


def axes(task: Task) -> tuple[Axis, ...]:
    """Return the axes of the space; `auto` becomes every value that could be legal for this task."""
    return tuple(_axis(task, knob) for knob in KNOBS)


def neutral(knob: str) -> KnobValue:
    """Return the value of a knob that does not apply."""
    if knob in FLAGS:
        return False
    return None if knob in OPTIONAL else 1


def candidate_columns(values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Return columns of one row from knob values; knobs that are absent are neutral."""
    columns = {knob: _one(knob, values.get(knob, neutral(knob))) for knob in KNOBS}
    columns |= {knob: _one(knob, values.get(knob)) for knob in JOB_KNOBS}
    return columns


def _one(knob: str, value: KnobValue) -> IntArray:
    try:
        code = 0 if value is None else WORDS[knob].index(value) if isinstance(value, str) else int(value)
    except (KeyError, ValueError, TypeError):
        raise SpecError(key=knob, value=value, problem="is no value of this knob") from None
    return np.array([code], dtype=np.int64)


def _axis(task: Task, knob: str) -> Axis:
    asked = task.spec.space.get(knob, AUTO)
    values = _auto(task, knob) if isinstance(asked, str) else asked
    return Axis(
        knob=knob, values=tuple(values), neutral=neutral(knob), words=WORDS.get(knob, ()), is_flag=knob in FLAGS
    )


def _auto(task: Task, knob: str) -> tuple[KnobValue, ...]:
    """Return every value of `knob` that some candidate could have: divisors, both flags, all words."""
    spec, devices = task.spec, task.cluster.devices
    layers = spec.model.num_layers
    if knob in FLAGS:
        return (False, True)
    if knob in WORDS:
        return WORDS[knob][1:]
    if knob == "num_layers_per_virtual_pipeline_stage":
        return (None, *divisors(layers))
    if knob == "recompute_num_layers":
        return tuple(range(1, layers + 1))
    if knob == "micro_batch_size":
        return divisors(spec.train.global_batch_size)
    if knob == "expert_model_parallel_size":
        return divisors(int(np.gcd(spec.model.num_moe_experts or 1, devices)))
    return divisors(devices)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
