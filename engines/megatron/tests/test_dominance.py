"""Which candidates need or take at least as much as another: directions, and what the model says of them."""

import dataclasses
import random

import numpy as np
import pytest
from flagcore_megatron.adapter import ENGINE
from flagcore_megatron.space.knobs import candidate_columns

from flagcore.domain.space import KnobValue
from flagcore.tuner.stages.build import build
from tests.product import tasks

DP, TP, PP = "data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
CP, EP, MBS = "context_parallel_size", "expert_model_parallel_size", "micro_batch_size"
LAYERS, SHARDED = "recompute_num_layers", "use_distributed_optimizer"
FULL: dict[str, KnobValue] = {"use_recompute": True, "recompute_granularity": "full"}
UNIFORM = {**FULL, "recompute_method": "uniform", LAYERS: 1}
BLOCK = {**FULL, "recompute_method": "block"}
SELECTIVE: dict[str, KnobValue] = {"use_recompute": True, "recompute_granularity": "selective"}

MORE_MEMORY: dict[str, tuple[dict[str, KnobValue], dict[str, KnobValue]]] = {
    "a larger micro batch": ({MBS: 4}, {MBS: 2}),
    "no sequence parallelism": ({TP: 2}, {TP: 2, "sequence_parallel": True}),
    "an optimizer that is not sharded": ({}, {SHARDED: True}),
    "no recompute": ({}, UNIFORM),
    "no recompute instead of selective": ({}, SELECTIVE),
    "fewer layers by block": ({**BLOCK, LAYERS: 1}, {**BLOCK, LAYERS: 2}),
    "all of it": ({MBS: 2}, {**UNIFORM, SHARDED: True}),
}


@pytest.mark.parametrize("name", MORE_MEMORY)
def test_candidates_that_need_at_least_as_much_memory_are_found(name: str) -> None:
    more, less = MORE_MEMORY[name]
    assert ENGINE.needs_at_least(candidate_columns(more), tasks.candidate(**less)).tolist() == [True]
    assert ENGINE.needs_at_least(candidate_columns(less), tasks.candidate(**more)).tolist() == [False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({TP: 2}, {TP: 4}),
        ({DP: 2}, {DP: 4}),
        ({PP: 2}, {PP: 4}),
        ({CP: 2}, {CP: 4}),
        ({EP: 2}, {EP: 4}),
        ({"num_layers_per_virtual_pipeline_stage": 1, PP: 2}, {PP: 2}),
        (UNIFORM, {**BLOCK, LAYERS: 2}),
        (UNIFORM, {**UNIFORM, LAYERS: 2}),
        (SELECTIVE, UNIFORM),
        (SELECTIVE, {**BLOCK, LAYERS: 1}),
        ({MBS: 2}, {SHARDED: False, MBS: 4, **UNIFORM}),
    ],
)
def test_other_differences_give_no_conclusion(one: dict[str, KnobValue], other: dict[str, KnobValue]) -> None:
    for row, than in ((one, other), (other, one)):
        assert not ENGINE.needs_at_least(candidate_columns(row), tasks.candidate(**than)).any()


def test_only_candidates_with_more_recompute_take_at_least_as_long() -> None:
    plain = tasks.candidate()
    assert ENGINE.takes_at_least(candidate_columns(UNIFORM), plain).all()
    assert ENGINE.takes_at_least(candidate_columns(SELECTIVE), plain).all()
    assert not ENGINE.takes_at_least(candidate_columns({}), tasks.candidate(**UNIFORM)).any()
    assert not ENGINE.takes_at_least(candidate_columns({MBS: 2}), plain).any()
    assert not ENGINE.takes_at_least(candidate_columns({SHARDED: True}), plain).any()


@pytest.mark.parametrize("seed", range(6))
def test_the_model_never_contradicts_the_order(seed: int) -> None:
    draw = random.Random(seed)
    model = dataclasses.replace(
        draw.choice([tasks.DENSE, tasks.EXPERTS]),
        num_layers=draw.choice([4, 6, 8]),
        hidden_size=256,
        vocab_size=draw.choice([1000, 32000]),
    )
    job = {"seq_length": draw.choice([128, 512]), "attention": draw.choice(["flash", "unfused"])}
    task = tasks.task(model, devices=draw.choice([4, 8]), global_batch_size=draw.choice([8, 16]), **job)
    space = build(ENGINE.axes(task), ENGINE.rules(task), ENGINE.merges(task))
    columns = space.columns()
    predictions = ENGINE.predict(task, columns, tasks.costs(task))
    memory, seconds = predictions.device_used_bytes, predictions.step_time_s
    compared = 0
    for row in draw.sample(range(len(space)), 60):
        one = space.candidate(row)
        above = ENGINE.needs_at_least(columns, one)
        assert np.all(memory[above] >= memory[row] * (1 - 1e-9)), contradiction(space, memory, above, row)
        longer = ENGINE.takes_at_least(columns, one)
        assert np.all(seconds[longer] >= seconds[row] * (1 - 1e-9)), contradiction(space, seconds, longer, row)
        compared += int(above.sum()) + int(longer.sum()) - 2
    assert compared > 100


def contradiction(space: object, figures: np.ndarray, rows: np.ndarray, row: int) -> str:
    lowest = int(np.flatnonzero(rows)[np.argmin(figures[rows])])
    return f"{space.candidate(lowest)}: {figures[lowest]} < {figures[row]}: {space.candidate(row)}"  # type: ignore[attr-defined]
