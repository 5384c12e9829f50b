"""More savings never need more memory, over random pairs of candidates and settings; and what single savings hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flagcore_training import stages as pipeline
from flagcore_training.layout import Layout, Options, Training
from flagcore_training.memory.stored_activations import Kinds
from flagcore_training.memory.training import component_table
from flagcore_training.schedules import SCHEDULES

from engines.training.tests.simulation import (
    DEEPSEEK_16B,
    LATENT,
    LLAMA,
    MOE,
    layout,
    random_layouts,
    rank_memory,
    state_bytes,
    train,
    training_memory,
)
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter

pytestmark = pytest.mark.slow

PAIRS = 8
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
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj")
OFFLOAD = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")

WIDE = ("dense", "experts", "latent attention")
"""Models whose structure a small one has, too."""

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


def assert_never_more(less: Job, more: Job, times: float = 1.0 + 1e-12) -> None:
    """Fail where the second needs more than the first."""
    one, two = training_memory(*less).peak, training_memory(*more).peak
    worse = two > one * times
    assert not worse.any(), (float((two / one).max()), less[0].options, more[0].options, np.flatnonzero(worse))


def full(split: Layout, **values: float) -> Layout:
    return dataclasses.replace(split, **{name: np.full_like(split.data, value) for name, value in values.items()})


def changed(job: Training, **values: Any) -> Training:
    return dataclasses.replace(job, options=dataclasses.replace(job.options, **values))


def saved(draw: np.random.Generator, split: Layout) -> Layout:
    return [split, full(split, selective=1), full(split, uniform=1), full(split, block=2)][int(draw.integers(0, 4))]


Job = tuple[Training, Layout]
Pairs = Iterator[tuple[Job, Job]]


def recompute_of_layers(draw: np.random.Generator, model: Model) -> Pairs:
    job, split, number = work(draw, model), random_layouts(draw, model), int(draw.integers(0, 9))
    yield (job, full(split, block=number)), (job, full(split, block=number + 1))
    yield (job, split), (job, full(split, uniform=float(draw.integers(1, 4))))
    if not model.mtp_num_layers:  # block recompute leaves multi-token prediction out
        yield (job, full(split, block=number)), (job, full(split, uniform=1))


def recompute_of_modules(draw: np.random.Generator, model: Model) -> Pairs:
    job, split = work(draw, model), random_layouts(draw, model)
    selective = full(split, selective=1)
    changed_job = changed(job, recompute_modules=job.options.recompute_modules | {str(draw.choice(MODULES))})
    yield (job, split), (job, selective)
    yield (job, selective), (changed_job, selective)
    yield (job, selective), (job, full(split, uniform=1))


def offload(draw: np.random.Generator, model: Model) -> Pairs:
    job, split = work(draw, model, offload_stages=()), saved(draw, random_layouts(draw, model))
    more = changed(job, offload_modules=job.options.offload_modules | {str(draw.choice(OFFLOAD))})
    yield (job, split), (more, split)
    yield (changed(more, offload_stages=(1,)), split), (more, split)


def shards_and_states(draw: np.random.Generator, model: Model) -> Pairs:
    job, split = work(draw, model, fsdp=False, precision_aware_optimizer=False), random_layouts(draw, model)
    yield (job, split), (changed(job, fsdp=True), split)
    yield (job, full(split, sharded_optimizer=0)), (job, full(split, sharded_optimizer=1))
    aware = changed(job, precision_aware_optimizer=True)
    yield (job, split), (aware, split)
    yield (aware, split), (changed(aware, exp_avg_bytes=2, exp_avg_sq_bytes=2), split)
    yield (job, split), (changed(job, optimizer_offload_fraction=0.5), split)


def smaller_batches_and_models(draw: np.random.Generator, model: Model) -> Pairs:
    job, split = work(draw, model), saved(draw, random_layouts(draw, model))
    for values in ({"micro_batch": 2 * split.micro_batch}, {"microbatches": 2 * split.microbatches}):
        yield (job, dataclasses.replace(split, **values)), (job, split)
    yield (dataclasses.replace(job, sequence=2 * job.sequence), split), (job, split)


def larger_models(draw: np.random.Generator, model: Model) -> Pairs:
    job, split = work(draw, model, schedule=None, offload_modules=frozenset()), random_layouts(draw, model)
    deeper = dataclasses.replace(model, num_layers=2 * model.num_layers)
    yield (dataclasses.replace(job, model=deeper), split), (job, split)


def wider_tensor_parallelism(draw: np.random.Generator, model: Model) -> Pairs:
    split = full(random_layouts(draw, model), sequence_parallel=1)  # experts require it
    job = train(model, transformer_engine=bool(draw.integers(2)), flash=bool(draw.integers(2)))
    wider = dataclasses.replace(split, tensor=2 * split.tensor, expert_tensor=2 * split.expert_tensor)
    yield (job, split), (job, wider)


SAVINGS = (
    *(recompute_of_layers, recompute_of_modules, offload, shards_and_states),
    *(smaller_batches_and_models, larger_models, wider_tensor_parallelism),
)


@each_model
@pytest.mark.parametrize("saving", SAVINGS, ids=lambda saving: saving.__name__)
def test_a_saving_never_needs_more_memory(saving: Callable[[np.random.Generator, Model], Pairs], model: Model) -> None:
    draw = np.random.default_rng(1 + SAVINGS.index(saving))
    for _ in range(PAIRS):
        for less, more in saving(draw, model):
            assert_never_more(less, more)


@each_model
def test_sequence_parallel_hardly_needs_more_memory(model: Model) -> None:
    draw = np.random.default_rng(9)
    for _ in range(PAIRS):
        job, split = train(model, transformer_engine=bool(draw.integers(2))), random_layouts(draw, model)
        assert_never_more((job, full(split, sequence_parallel=0)), (job, full(split, sequence_parallel=1)), 1.02)


def test_overlapped_experts_hold_one_more_pass_and_part_of_a_layer() -> None:
    """Forward passes of an exchange that is overlapped run layer by layer beside backward (megatron-core 0.16)."""
    split = layout(data=8, expert=8, microbatches=[1, 8, 8], pipeline=[1, 1, 4], virtual=[1, 1, 2])
    job = train(dataclasses.replace(MOE, vocab_size=1024), transformer_engine=True)
    hidden = changed(job, overlap_expert_comm=True)
    extra = rank_memory(hidden, split, 0).activation - rank_memory(job, split, 0).activation
    layer = Kinds.from_layout(job, split).plain[-1].stored
    assert extra[0] == 0  # nothing runs beside the only micro-batch
    assert (extra[1:] > 0).all()
    assert (extra[1:] < 1.2 * layer[1:]).all()


def test_fully_sharded_on_one_rank_adds_nothing() -> None:
    job, split = train(MOE), layout(expert=1)
    assert rank_memory(changed(job, fsdp=True), split, 0).peak == rank_memory(job, split, 0).peak


def test_fully_sharded_layers_are_gathered_one_at_a_time() -> None:
    job, split = train(LLAMA, options=Options(fsdp=True)), layout(data=64)
    adapters = changed(job, adapter=Adapter())
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    single = rank_memory(train(LLAMA), split, 0).activation
    assert rank_memory(job, split, 0).activation - single == pytest.approx(2 * (2 + 4) * layer)
    one = rank_memory(changed(adapters, fsdp=False), split, 0).activation
    assert rank_memory(adapters, split, 0).activation - one == pytest.approx(2 * 2 * layer, rel=0.02)


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
        job, split = work(draw, model, schedule=None), full(random_layouts(draw, model), virtual=1)
        if knob == "sharded_optimizer":
            finer = full(split, sharded_optimizer=1)
        else:
            finer = dataclasses.replace(split, **{knob: 2 * getattr(split, knob)})
        if knob == "tensor":  # a rank has no smaller share of an expert than of the rest
            finer = dataclasses.replace(finer, expert_tensor=2 * split.expert_tensor)
        assert (largest_peak(job, finer) <= largest_peak(job, split) * (1 + 1e-12)).all(), job.options
