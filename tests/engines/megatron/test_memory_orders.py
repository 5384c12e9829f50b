"""Memory of random candidates: monotone where it must be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flagcore.domain.model import Model
from flagcore.engines.megatron.parallel.layout import Layout, Options, Training
from tests.engines.megatron.candidates import DEEPSEEK_16B, LLAMA, MOE, NUMBER, random_layouts, train, training_memory

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
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "moe_fc1", "router")
OFFLOAD = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
each_work = pytest.mark.parametrize("work", WORK.values(), ids=WORK)


def peak(work: Training, split: Layout) -> np.ndarray:
    return training_memory(work, split).peak


def all_of(value: float) -> np.ndarray:
    return np.full(NUMBER, value)


@each_model
@each_work
@pytest.mark.parametrize("knob", ["micro_batch", "microbatches"])
def test_more_work_at_once_never_needs_less(model: Model, work: dict[str, Any], knob: str) -> None:
    split = random_layouts(model)
    larger = dataclasses.replace(split, **{knob: 2 * getattr(split, knob)})
    assert (peak(train(model, **work), larger) >= peak(train(model, **work), split)).all()


@each_model
@each_work
def test_longer_sequences_never_need_less(model: Model, work: dict[str, Any]) -> None:
    split = random_layouts(model)
    found = [peak(train(model, sequence=length, **work), split) for length in (2048, 4096, 8192)]
    assert (np.diff(np.stack(found), axis=0) >= 0).all()


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
def test_recompute_never_needs_more(model: Model, work: dict[str, Any]) -> None:
    split, job = random_layouts(model), train(model, **work)
    for saving in ("selective", "uniform", "block"):
        assert (peak(job, dataclasses.replace(split, **{saving: all_of(1.0)})) <= peak(job, split)).all(), saving
    blocks = [peak(job, dataclasses.replace(split, block=all_of(float(number)))) for number in range(4)]
    assert (np.diff(np.stack(blocks), axis=0) <= 0).all()


def joined(names: set[str]) -> str:
    """Return an identifier of a test that does not depend on the order of a set."""
    return "+".join(sorted(names))


@each_model
@each_work
@pytest.mark.parametrize("modules", [{name} for name in MODULES] + [{"mlp", "layernorm"}, set(MODULES)], ids=joined)
def test_recompute_of_modules_never_needs_more(model: Model, work: dict[str, Any], modules: set[str]) -> None:
    split, job = random_layouts(model), train(model, options=Options(recompute_modules=frozenset(modules)), **work)
    assert (peak(job, dataclasses.replace(split, selective=all_of(1.0))) <= peak(job, split)).all()


@each_model
@pytest.mark.parametrize("modules", [{name} for name in OFFLOAD] + [set(OFFLOAD)], ids=joined)
def test_offload_never_needs_more(model: Model, modules: set[str]) -> None:
    split = random_layouts(model)
    resident, offloaded = (
        train(model, options=Options(offload_modules=frozenset(names))) for names in (set(), modules)
    )
    assert (peak(offloaded, split) <= peak(resident, split)).all()


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
