"""Models, and candidates of them as physics takes them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.cluster import Level, Topology
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.engines.training.layout import Layout, Training
from flagcore.engines.training.memory.training import Memory, memory_in_use
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.cost_stack import PlainMemory
from flagcore.physics.roofline import Roofline
from flagcore.spec.models import model_from
from tests import small


def public(name: str, **changes: Any) -> Model:
    """Return a public model, with other values of some of its fields."""
    return dataclasses.replace(model_from(name, base=Path()), **changes)


LLAMA = public("meta-llama/Llama-2-7b-hf")
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
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
ZEROS = (
    "sharded_optimizer",
    "sequence_parallel",
    "selective",
    "uniform",
    "block",
    "first_layers",
    "last_layers",
    "split",
)
NEUTRAL = {**dict.fromkeys(ONES, 1.0), **dict.fromkeys(ZEROS, 0.0), "microbatches": 8.0}
NODE = Level(name="node", devices=8, bytes_per_second=400e9, latency_seconds=5e-6)
NETWORK = Level(name="network", devices=1024, bytes_per_second=50e9, latency_seconds=20e-6)
TOPOLOGY = Topology(levels=(NODE, NETWORK))
NUMBER = 400
"""Random candidates of one draw."""


def layout(**values: Any) -> Layout:
    """Return candidates: one, or as many as the longest value has."""
    arrays = np.broadcast_arrays(*[np.asarray(value, dtype=np.float64) for value in (NEUTRAL | values).values()])
    return Layout(**dict(zip(NEUTRAL | values, (np.atleast_1d(array) for array in arrays), strict=True)))


def train(model: Model = LLAMA, **values: Any) -> Training:
    """Return the work of a step."""
    return Training(model=model, **{"sequence": 4096, "global_batch": 64, "precision": "bf16", **values})


def training_memory(work: Training, split: Layout, workspace_bytes: float = 0.0) -> Memory:
    """Return the memory of the worst stage of each candidate."""
    device = PlainMemory(capacity=None, workspace=workspace_bytes)
    collectives = Collectives(topology=topology_of(small.task().cluster.groups[0]))
    costs = Costs(memory=device, kernels=Roofline(chip=small.CHIP), collectives=collectives)
    return memory_in_use(work, split, costs).memory


def state_bytes(component: Mapping[str, FloatArray]) -> FloatArray:
    """Return what a component of the table takes besides activations."""
    names = ("weights_bytes", "gradients_bytes", "main_params_bytes", "optimizer_bytes")
    return sum((component[name] for name in names), np.zeros(()))


def random_layouts(model: Model) -> Layout:
    """Return candidates of any kind; those with experts have their kinds of parallelism too."""
    draw = np.random.default_rng(7)
    pick = {
        name: draw.choice([1.0, 2.0, 4.0, 8.0], NUMBER) for name in ("data", "tensor", "micro_batch", "microbatches")
    }
    sizes = {"pipeline": draw.choice([1.0, 2.0, 4.0], NUMBER), "context": draw.choice([1.0, 2.0], NUMBER)}
    flags = {name: draw.choice([0.0, 1.0], NUMBER) for name in ("sharded_optimizer", "sequence_parallel")}
    virtual = np.where(sizes["pipeline"] > 1, draw.choice([1.0, 2.0], NUMBER), 1.0)
    expert = np.minimum(draw.choice([1.0, 2.0, 4.0, 8.0], NUMBER), pick["data"]) if model.num_moe_experts else 1.0
    return layout(**pick, **sizes, **flags, virtual=virtual, expert=expert, expert_tensor=pick["tensor"])
