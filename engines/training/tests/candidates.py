"""Models, and candidates of them as physics takes them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.training import Memory, memory_in_use, stages_in_use
from flagcore_training.stages import Stage, stage

from flagcore.contracts import Costs
from flagcore.domain.cluster import Level, Topology
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import PlainMemory
from flagcore.spec.models import model_from
from tests.product import tasks


def public(name: str, **changes: Any) -> Model:
    """Return a public model, with other values of some of its fields."""
    return dataclasses.replace(model_from(name, base=Path()), **changes)


LLAMA = public("meta-llama/Llama-2-7b-hf")
LATENT: dict[str, Any] = {"multi_latent_attention": True, "kv_lora_rank": 512}
LATENT |= {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
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
    **LATENT,
)
MOE = dataclasses.replace(LLAMA, num_layers=24, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=4096)

ONES = ("data", "tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "micro_batch")
STATES = ("sharded_optimizer", "sequence_parallel", "selective", "uniform", "block")
ZEROS = (*STATES, "expert_groups", "first_layers", "last_layers", "split")
NEUTRAL = {**dict.fromkeys(ONES, 1.0), **dict.fromkeys(ZEROS, 0.0), "microbatches": 8.0}
NODE = Level(name="node", devices=8, bytes_per_second=400e9, latency_seconds=5e-6)
NETWORK = Level(name="network", devices=1024, bytes_per_second=50e9, latency_seconds=20e-6)
TOPOLOGY = Topology(levels=(NODE, NETWORK))


def layout(**values: Any) -> Layout:
    """Return candidates: one, or as many as the longest value has."""
    arrays = np.broadcast_arrays(*[np.asarray(value, dtype=np.float64) for value in (NEUTRAL | values).values()])
    return Layout(**dict(zip(NEUTRAL | values, (np.atleast_1d(array) for array in arrays), strict=True)))


def train(model: Model = LLAMA, **values: Any) -> Training:
    """Return the work of a step."""
    return Training(model=model, **{"sequence": 4096, "global_batch": 64, "precision": "bf16", **values})


def plain_costs(workspace_bytes: float = 0.0) -> Costs:
    """Return the costs of a device without a memory limit."""
    device = PlainMemory(capacity=None, workspace=workspace_bytes)
    return dataclasses.replace(tasks.costs(tasks.task()), memory=device)


def training_memory(work: Training, split: Layout, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of the worst stage of each candidate."""
    return memory_in_use(work, split, plain_costs(workspace_bytes)).memory


def stage_of_rank(work: Training, split: Layout, rank: float) -> Stage:
    """Return the pipeline stage of a global rank of each candidate, in Megatron's rank order tp-cp-ep-dp-pp."""
    index = np.minimum(np.floor(rank / (split.tensor * split.context * split.data)), split.pipeline - 1.0)
    return stage(work.model, split, index, work.options)


def rank_memory(work: Training, split: Layout, rank: float, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of a global rank of each candidate."""
    (found,) = stages_in_use(work, split, plain_costs(workspace_bytes), [stage_of_rank(work, split, rank)])
    return found.memory


def state_bytes(component: Mapping[str, FloatArray]) -> FloatArray:
    """Return what a component of the table takes besides activations."""
    names = ("weights_bytes", "gradients_bytes", "main_params_bytes", "optimizer_bytes")
    return sum((component[name] for name in names), np.zeros(()))


def random_layouts(draw: np.random.Generator, model: Model, number: int = 24) -> Layout:
    """Return candidates with all kinds of splits and nothing recomputed."""
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
