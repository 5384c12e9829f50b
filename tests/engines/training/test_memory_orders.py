"""Memory of random candidates: monotone where it must be. Recompute, offload and batches: `test_memory_savings`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flagcore.domain.model import Model
from flagcore.engines.training.layout import Layout, Options, Training
from tests.engines.training.candidates import DEEPSEEK_16B, LLAMA, MOE, NUMBER, random_layouts, train, training_memory

MODELS = {
    "dense": LLAMA,
    "no gate": dataclasses.replace(LLAMA, gated_linear_unit=False, num_query_groups=4),
    "experts": MOE,
    "latent attention": DEEPSEEK_16B,
    "several tokens": dataclasses.replace(LLAMA, mtp_num_layers=2, num_layers=8),
}
WORK: dict[str, dict[str, Any]] = {
    "local": {"fused_activation": True},
    "transformer_engine": {"fused_activation": True, "transformer_engine": True},
    "unfused": {"flash": False},
}

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
each_work = pytest.mark.parametrize("work", WORK.values(), ids=WORK)


def peak(work: Training, split: Layout) -> np.ndarray:
    return training_memory(work, split).peak


def all_of(value: float) -> np.ndarray:
    return np.full(NUMBER, value)


@each_model
@each_work
def test_more_layers_never_need_less(model: Model, work: dict[str, Any]) -> None:
    deeper = dataclasses.replace(model, num_layers=2 * model.num_layers)
    split = random_layouts(model)
    assert (peak(train(deeper, **work), split) >= peak(train(model, **work), split)).all()


@each_model
@each_work
def test_a_sharded_optimizer_never_needs_more(model: Model, work: dict[str, Any]) -> None:
    split = random_layouts(model)
    plain, sharded = (dataclasses.replace(split, sharded_optimizer=all_of(value)) for value in (0.0, 1.0))
    assert (peak(train(model, **work), sharded) <= peak(train(model, **work), plain)).all()


@each_model
@each_work
def test_savings_of_states_never_need_more(model: Model, work: dict[str, Any]) -> None:
    split, plain = random_layouts(model), train(model, **work)
    for options in (
        Options(precision_aware_optimizer=True),
        Options(precision_aware_optimizer=True, exp_avg_bytes=2, exp_avg_sq_bytes=2),
        Options(optimizer_offload_fraction=0.5),
    ):
        assert (peak(train(model, options=options, **work), split) <= peak(plain, split)).all(), options


@each_model
@each_work
def test_wider_tensor_parallel_never_needs_more(model: Model, work: dict[str, Any]) -> None:
    split = dataclasses.replace(random_layouts(model), sequence_parallel=all_of(1.0))  # experts require it
    wider = dataclasses.replace(split, tensor=2 * split.tensor, expert_tensor=2 * split.expert_tensor)
    assert (peak(train(model, **work), wider) <= peak(train(model, **work), split)).all()


@each_model
@each_work
def test_sequence_parallel_never_needs_more(model: Model, work: dict[str, Any]) -> None:
    split = random_layouts(model)
    plain, parallel = (dataclasses.replace(split, sequence_parallel=all_of(value)) for value in (0.0, 1.0))
    assert (peak(train(model, **work), parallel) <= 1.02 * peak(train(model, **work), plain)).all()
