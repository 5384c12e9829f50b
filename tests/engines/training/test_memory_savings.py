"""More savings never need more memory, over random pairs of candidates and settings; and what single savings hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flagcore.domain.model import Model
from flagcore.engines.training import stages as pipeline
from flagcore.engines.training.layout import Layout, Options, Training
from flagcore.engines.training.memory.stored_activations import Kinds
from flagcore.engines.training.memory.training import component_table, rank_memory
from flagcore.physics.schedules.catalogue import SCHEDULES
from tests.engines.training.candidates import (
    DEEPSEEK_16B,
    LATENT,
    LLAMA,
    MOE,
    layout,
    state_bytes,
    train,
    training_memory,
)

pytestmark = pytest.mark.slow

PAIRS = 20
SMALL = dataclasses.replace(LLAMA, num_layers=4, hidden_size=256, ffn_hidden_size=768, num_attention_heads=8)
FEW = dataclasses.replace(SMALL, num_query_groups=2, kv_channels=32, vocab_size=1024)
MODELS = {
    "dense": LLAMA,
    "few layers": FEW,
    "experts": MOE,
    "latent attention": DEEPSEEK_16B,
    "few experts, two tokens": dataclasses.replace(
        FEW,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        moe_shared_expert_intermediate_size=128,
        moe_first_dense_layers=1,
        mtp_num_layers=1,
        **LATENT,
    ),
}
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "moe_fc1", "router")
OFFLOAD = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")

WIDE = ("experts", "latent attention")
"""Models whose structure the small one with few experts has, too."""

each_model = pytest.mark.parametrize(
    "model",
    [pytest.param(model, id=name, marks=pytest.mark.long if name in WIDE else ()) for name, model in MODELS.items()],
)


def random_names(draw: np.random.Generator, names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name in names if draw.random() < 0.4)


def options(draw: np.random.Generator, model: Model) -> dict[str, Any]:
    experts = model.num_moe_experts is not None
    return {
        "schedule": [None, None, *SCHEDULES][int(draw.integers(0, len(SCHEDULES) + 2))],
        "fsdp": bool(draw.random() < 0.3),
        "overlap_expert_comm": bool(experts and draw.random() < 0.4),
        "offload_modules": random_names(draw, OFFLOAD) if draw.random() < 0.5 else frozenset(),
        "offload_stages": (0, 2) if draw.random() < 0.3 else (),
        "precision_aware_optimizer": bool(draw.random() < 0.3),
        "recompute_modules": random_names(draw, MODULES) or frozenset({"core_attn"}),
    }


def work(draw: np.random.Generator, model: Model, **changes: Any) -> Training:
    found = Options(**{**options(draw, model), **changes})
    return train(
        model,
        sequence=int(draw.choice([512, 4096])),
        precision=str(draw.choice(["bf16", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"])),
        flash=bool(draw.random() < 0.7),
        fused_activation=bool(draw.random() < 0.5),
        transformer_engine=bool(draw.random() < 0.5),
        options=found,
    )


def layouts(draw: np.random.Generator, model: Model) -> Layout:
    """Return a few candidates with all kinds of splits and nothing recomputed."""
    number = 24
    data, tensor = draw.choice([1.0, 2.0, 8.0], number), draw.choice([1.0, 2.0, 4.0], number)
    pipes = draw.choice([1.0, 2.0, 4.0], number)
    expert = np.minimum(draw.choice([1.0, 2.0, 8.0], number), data) if model.num_moe_experts else np.ones(number)
    return layout(
        data=data,
        tensor=tensor,
        pipeline=pipes,
        virtual=np.where(pipes > 1, draw.choice([1.0, 2.0], number), 1.0),
        context=draw.choice([1.0, 2.0], number),
        expert=expert,
        expert_tensor=tensor,
        micro_batch=draw.choice([1.0, 4.0], number),
        microbatches=draw.choice([1.0, 2.0, 16.0], number),
        sharded_optimizer=draw.choice([0.0, 1.0], number),
        sequence_parallel=draw.choice([0.0, 1.0], number),
    )


def assert_never_more(less: tuple[Training, Layout], more: tuple[Training, Layout]) -> None:
    """Fail where the second needs more than the first."""
    one, two = training_memory(*less).peak, training_memory(*more).peak
    worse = two > one * (1.0 + 1e-12)
    assert not worse.any(), (float((two / one).max()), less[0].options, more[0].options, np.flatnonzero(worse))


def full(split: Layout, **values: float) -> Layout:
    return dataclasses.replace(split, **{name: np.full_like(split.data, value) for name, value in values.items()})


def changed(job: Training, **values: Any) -> Training:
    return dataclasses.replace(job, options=dataclasses.replace(job.options, **values))


@each_model
def test_recompute_of_more_layers_never_needs_more(model: Model) -> None:
    draw = np.random.default_rng(1)
    for _ in range(PAIRS):
        job, split, number = work(draw, model), layouts(draw, model), int(draw.integers(0, 9))
        assert_never_more((job, full(split, block=number)), (job, full(split, block=number + 1)))
        assert_never_more((job, split), (job, full(split, uniform=float(draw.integers(1, 4)))))
        if not model.mtp_num_layers:  # block recompute leaves multi-token prediction out
            assert_never_more((job, full(split, block=number)), (job, full(split, uniform=1)))


@each_model
def test_recompute_of_more_layers_of_a_stage_never_needs_more(model: Model) -> None:
    draw = np.random.default_rng(2)
    for _ in range(PAIRS):
        numbers = tuple(int(number) for number in draw.integers(0, 6, 4))
        place = int(draw.integers(0, 4))
        layers = tuple(number + (index == place) for index, number in enumerate(numbers))
        job, split = work(draw, model, recompute_stage_layers=numbers), layouts(draw, model)
        assert_never_more((changed(job, recompute_stage_layers=()), split), (job, split))
        assert_never_more((job, split), (changed(job, recompute_stage_layers=layers), split))


@each_model
def test_recompute_of_more_modules_never_needs_more(model: Model) -> None:
    draw = np.random.default_rng(3)
    for _ in range(PAIRS):
        job, split = work(draw, model), layouts(draw, model)
        selective = full(split, selective=1)
        changed_job = changed(job, recompute_modules=job.options.recompute_modules | {str(draw.choice(MODULES))})
        assert_never_more((job, split), (job, selective))
        assert_never_more((job, selective), (changed_job, selective))
        assert_never_more((job, selective), (job, full(split, uniform=1)))


@each_model
def test_offload_of_more_never_needs_more(model: Model) -> None:
    draw = np.random.default_rng(4)
    for _ in range(PAIRS):
        job, split = work(draw, model, offload_stages=()), layouts(draw, model)
        saved = [split, full(split, selective=1), full(split, uniform=1), full(split, block=2)][
            int(draw.integers(0, 4))
        ]
        changed_job = changed(job, offload_modules=job.options.offload_modules | {str(draw.choice(OFFLOAD))})
        assert_never_more((job, saved), (changed_job, saved))
        assert_never_more((changed(changed_job, offload_stages=(1,)), saved), (changed_job, saved))


@each_model
def test_fully_sharded_never_needs_more(model: Model) -> None:
    draw = np.random.default_rng(5)
    for _ in range(PAIRS):
        job, split = work(draw, model, fsdp=False), layouts(draw, model)
        assert_never_more((job, split), (changed(job, fsdp=True), split))


@each_model
def test_a_larger_batch_never_needs_less(model: Model) -> None:
    draw = np.random.default_rng(6)
    for _ in range(PAIRS):
        job, split = work(draw, model), layouts(draw, model)
        saved = [split, full(split, selective=1), full(split, uniform=1), full(split, block=2)][
            int(draw.integers(0, 4))
        ]
        twice = {"micro_batch": 2 * split.micro_batch, "microbatches": 2 * split.microbatches}
        for name, values in twice.items():
            assert_never_more((job, dataclasses.replace(saved, **{name: values})), (job, saved))
        assert_never_more((dataclasses.replace(job, sequence=2 * job.sequence), saved), (job, saved))


def test_overlapped_experts_hold_one_more_pass_and_part_of_a_layer() -> None:
    """Forward passes of an exchange that is overlapped run layer by layer beside backward (megatron-core 0.16)."""
    split = layout(data=8, expert=8, microbatches=[1, 8, 8], pipeline=[1, 1, 4], virtual=[1, 1, 2])
    job = train(dataclasses.replace(MOE, vocab_size=1024), transformer_engine=True)
    hidden = changed(job, overlap_expert_comm=True)
    first = np.zeros(3)
    np.testing.assert_allclose(
        pipeline.in_flight(split, first, hidden.options), pipeline.in_flight(split, first, job.options)
    )
    extra = rank_memory(hidden, split, 0).activation - rank_memory(job, split, 0).activation
    layer = Kinds.from_layout(job, split).moe.stored
    assert extra[0] == 0  # nothing runs beside the only micro-batch
    assert (extra[1:] > 0).all()
    assert (extra[1:] < 1.2 * layer[1:]).all()


def test_fully_sharded_on_one_rank_adds_nothing() -> None:
    job, split = train(MOE), layout(expert=1)
    sharded = changed(job, fsdp=True)
    assert rank_memory(sharded, split, 0).peak == rank_memory(job, split, 0).peak


def test_fully_sharded_layers_are_gathered_one_at_a_time() -> None:
    job, split = train(LLAMA, options=Options(fsdp=True)), layout(data=64)
    adapters = changed(job, adapters=True)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    single = rank_memory(train(LLAMA), split, 0).activation
    assert rank_memory(job, split, 0).activation - single == pytest.approx(2 * (2 + 4) * layer)
    assert rank_memory(adapters, split, 0).activation - single == pytest.approx(2 * 2 * layer)


@each_model
@pytest.mark.parametrize("knob", ["tensor", "pipeline", "context", "expert", "sharded_optimizer"])
def test_states_of_a_finer_split_never_need_more(model: Model, knob: str) -> None:
    """On the stage that has most; what a step leaves behind, an engine's buffers and filled-up shards aside."""
    draw = np.random.default_rng(7)

    def largest_peak(job: Training, split: Layout) -> np.ndarray:
        found = []
        for where in pipeline.stages(model, split, job.options):
            table = component_table(job, split, where.index)
            found.append(sum(state_bytes(part) for name, part in table.items() if name not in ("buffers", "padding")))
        return np.max(np.stack(found), axis=0)

    for _ in range(PAIRS):
        job, split = work(draw, model, schedule=None), full(layouts(draw, model), virtual=1)
        if knob == "sharded_optimizer":
            finer = full(split, sharded_optimizer=1)
        else:
            finer = dataclasses.replace(split, **{knob: 2 * getattr(split, knob)})
        if knob == "tensor":  # a rank has no smaller share of an expert than of the rest
            finer = dataclasses.replace(finer, expert_tensor=2 * split.expert_tensor)
        assert (largest_peak(job, finer) <= largest_peak(job, split) * (1 + 1e-12)).all(), job.options
