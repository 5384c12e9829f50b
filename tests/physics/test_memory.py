"""Memory of a training rank: exact where it is arithmetic, monotone where it must be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flagcore.domain.model import Model
from flagcore.physics import pipeline
from flagcore.physics.layout import Layout, Training
from flagcore.physics.memory import training as memory
from flagcore.physics.memory.device import PlainMemory

LLAMA = Model(
    name="llama-7b-like",
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    vocab_size=32000,
)
DEEPSEEK_16B = Model(
    name="deepseek-16b-a3b-like",
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=11264,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=128,
    vocab_size=151851,
    num_moe_experts=64,
    moe_router_topk=6,
    moe_ffn_hidden_size=1408,
    moe_shared_expert_intermediate_size=2816,
    moe_first_dense_layers=1,
    multi_latent_attention=True,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)
MOE = dataclasses.replace(LLAMA, num_layers=24, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4096)
NEUTRAL = {
    **dict.fromkeys(
        ("data", "tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "micro_batch"), 1.0
    ),
    **dict.fromkeys(("sharded_optimizer", "sequence_parallel", "selective", "uniform", "block"), 0.0),
    "first_layers": 0.0,
    "last_layers": 0.0,
    "microbatches": 8.0,
}


def layout(**values: float | list[float]) -> Layout:
    arrays = np.broadcast_arrays(*[np.asarray(value, dtype=np.float64) for value in (NEUTRAL | values).values()])
    return Layout(**dict(zip(NEUTRAL | values, (np.atleast_1d(array) for array in arrays), strict=True)))


def train(model: Model = LLAMA, **values: object) -> Training:
    given = {"sequence": 4096, "global_batch": 64, "precision": "bf16", **values}
    return Training(model=model, **given)  # type: ignore[arg-type]


def parameters(model: Model, split: Layout, stage: int) -> float:
    work = train(model)
    parts = memory.stage_parameters(work, split, pipeline.stage(model, split, np.array([float(stage)])))
    return float(sum(memory.split_parameters(parts))[0])


def random_layouts(model: Model) -> Layout:
    draw = np.random.default_rng(7)
    pick = {name: draw.choice([1.0, 2.0, 4.0, 8.0], 400) for name in ("data", "tensor", "micro_batch", "microbatches")}
    sizes = {"pipeline": draw.choice([1.0, 2.0, 4.0], 400), "context": draw.choice([1.0, 2.0], 400)}
    flags = {name: draw.choice([0.0, 1.0], 400) for name in ("sharded_optimizer", "sequence_parallel")}
    virtual = np.where(sizes["pipeline"] > 1, draw.choice([1.0, 2.0], 400), 1.0)
    return layout(**pick, **sizes, **flags, virtual=virtual, expert_tensor=pick["tensor"])


def peak(model: Model, split: Layout) -> np.ndarray:
    return memory.training_memory(train(model), split).peak


def test_parameters_of_a_7b_model_are_exact() -> None:
    assert parameters(LLAMA, layout(), 0) == 6_738_415_616


@pytest.mark.parametrize(("stage", "count"), [(0, 1_750_138_880), (1, 1_619_066_880), (3, 1_750_142_976)])
def test_parameters_of_a_pipeline_stage_are_exact(stage: int, count: int) -> None:
    assert parameters(LLAMA, layout(pipeline=4), stage) == count


def test_parameters_of_a_latent_attention_mixture_are_exact() -> None:
    norms = 27 * 2 * 2048 + 2048
    assert parameters(DEEPSEEK_16B, layout(), 0) == 15_911_223_296 + norms


def test_a_tied_head_is_a_second_copy_only_on_another_stage() -> None:
    tied = dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False)
    table = 32000 * 4096
    assert parameters(LLAMA, layout(), 0) - parameters(tied, layout(), 0) == table
    assert parameters(tied, layout(pipeline=4), 3) == parameters(LLAMA, layout(pipeline=4), 3)


def test_stages_hold_every_weight_once() -> None:
    split = layout(pipeline=9, expert=4, expert_tensor=1)
    whole = parameters(DEEPSEEK_16B, layout(expert=4, expert_tensor=1), 0)
    assert sum(parameters(DEEPSEEK_16B, split, stage) for stage in range(9)) == whole


def test_static_bytes_follow_precision_and_sharding() -> None:
    count = parameters(LLAMA, layout(), 0)
    split = layout(data=[8, 8, 8], context=[1, 2, 1], sharded_optimizer=[0, 1, 1])
    static = memory.training_memory(train(), split).static
    angles = 4 * 4096 * 128
    np.testing.assert_allclose(static, np.multiply([18, 6 + 12 / 16, 6 + 12 / 8], count) + angles)
    full = memory.training_memory(train(precision="fp32"), split).static
    np.testing.assert_allclose(full, np.multiply([16, 8 + 8 / 16, 8 + 8 / 8], count) + angles)


def test_experts_are_sharded_over_their_own_group() -> None:
    split = layout(data=8, expert=4, expert_tensor=1, sharded_optimizer=1)
    np.testing.assert_allclose(split.expert_replicas(), 2)
    np.testing.assert_allclose(split.expert_shards(), 2)
    np.testing.assert_allclose(split.shards(), 8)


def test_interleaving_holds_more_and_the_last_stage_holds_least() -> None:
    split = layout(pipeline=[4, 4, 4], virtual=[1, 2, 1], microbatches=[8, 8, 2])
    np.testing.assert_allclose(pipeline.in_flight(split, np.zeros(3)), [4, 5.5, 2])
    np.testing.assert_allclose(pipeline.in_flight(split, np.full(3, 3.0)), [1, 2.5, 1])


def test_uneven_stages_are_followed_to_the_worst_one() -> None:
    split = layout(pipeline=4, first_layers=2, microbatches=32)
    assert memory.training_memory(train(), split).worst_stage[0] == 1


def test_measured_peak_of_one_rank_is_met() -> None:
    """One of 16 ranks without any split on an accelerator: 113.0 GiB static, 138.1 GiB at the optimizer step."""
    work = train(sequence=2048, fused_activation=True)
    found = memory.training_memory(work, layout(data=16, micro_batch=2), workspace_bytes=2**25)
    assert found.static[0] / 2**30 == pytest.approx(113.025, rel=1e-4)
    assert found.peak[0] / 2**30 == pytest.approx(138.127, rel=1e-4)


@pytest.mark.parametrize("model", [LLAMA, MOE], ids=lambda model: model.name)
@pytest.mark.parametrize("knob", ["micro_batch", "microbatches"])
def test_more_work_at_once_never_needs_less(model: Model, knob: str) -> None:
    split = random_layouts(model)
    more = dataclasses.replace(split, **{knob: 2 * getattr(split, knob)})
    assert (peak(model, more) >= peak(model, split)).all()


@pytest.mark.parametrize("model", [LLAMA, MOE], ids=["dense", "experts"])
def test_savings_never_need_more(model: Model) -> None:
    split = random_layouts(model)
    plain = dataclasses.replace(split, sharded_optimizer=0 * split.data)
    assert (peak(model, dataclasses.replace(split, sharded_optimizer=0 * split.data + 1)) <= peak(model, plain)).all()
    for saving in ("selective", "uniform", "block"):
        assert (peak(model, dataclasses.replace(split, **{saving: np.ones(400)})) <= peak(model, split)).all(), saving
    blocks = [peak(model, dataclasses.replace(split, block=np.full(400, float(n)))) for n in range(4)]
    assert (np.diff(np.stack(blocks), axis=0) <= 0).all()


@pytest.mark.parametrize("model", [LLAMA, MOE], ids=["dense", "experts"])
def test_wider_tensor_parallel_never_needs_more(model: Model) -> None:
    split = dataclasses.replace(random_layouts(model), sequence_parallel=np.ones(400))  # experts require it
    wider = dataclasses.replace(split, tensor=2 * split.tensor, expert_tensor=2 * split.expert_tensor)
    assert (peak(model, wider) <= peak(model, split)).all()


def test_scores_are_kept_only_without_a_fused_attention_core() -> None:
    split = layout(selective=[0, 1])
    flash, plain = (memory.training_memory(train(flash=flash), split).activation for flash in (True, False))
    scores = 32 * 4096**2
    assert plain[0] - flash[0] == pytest.approx(32 * 2 * scores, rel=0.05)
    assert plain[1] - flash[1] < 10 * scores


def test_plain_memory_tells_allocated_reserved_and_used_apart() -> None:
    model = PlainMemory(capacity=80e9, context_bytes=1e9, fragmentation=0.1)
    reserved = model.reserved_bytes(np.array([10e9]))
    assert model.capacity_bytes() == 80e9
    np.testing.assert_allclose(reserved, 11e9)
    np.testing.assert_allclose(model.device_used_bytes(reserved), 12e9)
