"""The fields of layouts by which times of layers and of stages are computed once."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from flagcore_training.layout import ArrayRecord, Layout, Options, Training
from flagcore_training.time.pace import Pace
from flagcore_training.time.stage import DEPENDS_ON, LAYER_COUNTS, Blocks

from engines.training.tests.candidates import DEEPSEEK_16B, layout, plain_costs, train
from flagcore.contracts import Costs

USUAL = {"tensor": 2.0, "sequence_parallel": 1.0, "context": 2.0, "data": 8.0, "expert": 4.0, "expert_tensor": 2.0}
USUAL |= {"pipeline": 2.0, "micro_batch": 2.0, "microbatches": 16.0, "selective": 1.0, "block": 2.0}
OTHER = {"tensor": 4.0, "sequence_parallel": 0.0, "context": 4.0, "data": 16.0, "expert": 8.0, "expert_tensor": 1.0}
OTHER |= {"pipeline": 3.0, "micro_batch": 4.0, "microbatches": 32.0, "selective": 0.0, "block": 4.0, "virtual": 2.0}
OTHER |= {"uniform": 1.0, "sharded_optimizer": 1.0, "expert_groups": 1.0, "first_layers": 4.0, "last_layers": 4.0}
JOB = train(
    replace(DEEPSEEK_16B, mtp_num_layers=1),
    transformer_engine=True,
    options=Options(overlap_expert_comm=True, dispatcher="alltoall", recompute_modules=frozenset({"layernorm"})),
)


def numbers(record: Any) -> list[float]:
    """Return all numbers of a record and of the records in it."""
    if isinstance(record, tuple):
        return [number for each in record for number in numbers(each)]
    if isinstance(record, ArrayRecord):
        return [number for each in fields(record) for number in numbers(getattr(record, each.name))]
    return np.ravel(record).tolist() if isinstance(record, (np.ndarray, float)) else []


def of_layers(job: Training, found: Layout, costs: Costs) -> list[float]:
    return numbers(Blocks.from_layout(job, found, costs).on(0))


def of_stages(job: Training, found: Layout, costs: Costs) -> list[float]:
    pace = Pace.from_blocks(job, found, costs, Blocks.from_layout(job, found, costs))
    return np.ravel(pace.seconds(np.full(1, 6.0), 1, first=True, mtp=True, last=True)).tolist()


@pytest.mark.parametrize(("seconds", "keys"), [(of_layers, LAYER_COUNTS), (of_stages, DEPENDS_ON)])
def test_times_differ_by_the_fields_that_are_keys_and_by_no_other(seconds: Any, keys: tuple[str, ...]) -> None:
    bases, found, costs = (USUAL, {**USUAL, "selective": 0.0, "block": 0.0}), set(), plain_costs()
    for base, (name, value) in product(bases, OTHER.items()):
        usual, other = layout(**base), layout(**{**base, name: value})
        if not np.allclose(seconds(JOB, usual, costs), seconds(JOB, other, costs), rtol=1e-12, atol=0.0):
            changed = {key for key in keys if (getattr(usual, key) != getattr(other, key)).any()}
            assert changed, name
            found |= changed
    assert found == {*keys}
