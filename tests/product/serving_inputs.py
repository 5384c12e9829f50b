"""Small serving tasks of physics: an accelerator with round peaks, models, and settings."""

from dataclasses import replace

import numpy as np
from flagcore_serving.model.iteration import IterationCosts, iteration_costs
from flagcore_serving.model.work import Overheads, Serving
from flagcore_serving.space.settings import USUAL, Settings

from flagcore.contracts import Costs
from flagcore.domain.chip import Fact
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.model import Model
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.roofline import PlainMemory, Roofline
from tests.product import tasks

SOURCE = tasks.SOURCE
PEAKS = {"bf16": 9e14, "fp8": 1.8e15}
CHIP = replace(
    tasks.CHIP, dense_flops_per_second={name: Fact(value=rate, source=SOURCE) for name, rate in PEAKS.items()}
)
DENSE = Model(
    name="dense-8b",
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
)
EXPERTS = replace(DENSE, name="experts", num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768)
LATENT = replace(
    DENSE,
    name="latent",
    num_query_groups=32,
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)
OVER = Overheads(
    iteration=1e-3,
    sequence=10e-6,
    request=5e-3,
    attention=15e-6,
    latent=15e-6,
    ffn=12e-6,
    experts={"bf16": 50e-6, "fp8": 50e-6},
    reduce=5e-6,
    reduce_doubling=1e-6,
    eager_kernels=60.0,
)


def settings(**arguments: object) -> Settings:
    """Settings of one device, but for what is given: one candidate each element of the longest list."""
    values: dict[str, object] = {
        **USUAL,
        **dict.fromkeys(("instances", "tensor", "pipeline", "data", "expert"), 1),
        "max_running": 256,
        "max_batched_tokens": 8192,
        "pass_tokens": 1e9,
        "block_size": 16,
        "context_len": 2048,
        "graph_tokens": 512,
        "prefix_caching": 0,
        "memory_fraction": 0.9,
        "cache_element_bytes": 2.0,
        "sharing": 1.0,
        **arguments,
    }
    rows = max(np.size(value) for value in values.values())
    columns = {name: np.broadcast_to(np.asarray(value), (rows,)) for name, value in values.items()}
    columns |= {name: columns[name].astype(float) for name in ("tensor", "pipeline", "data", "expert")}
    columns.setdefault("devices", columns["tensor"] * columns["pipeline"] * columns["data"])
    columns.setdefault("tower_shares", columns["tensor"])
    return Settings(**columns)


def costs(devices: int = 8) -> Costs:
    """What kernels and messages take on one node of the chip."""
    group = NodeGroup(chip=CHIP, nodes=1, devices_per_node=devices)
    return Costs(
        memory=PlainMemory.of(group), kernels=Roofline(chip=CHIP), collectives=Collectives(topology=topology_of(group))
    )


def times(
    model: Model = DENSE, precision: str = "bf16", overheads: Overheads = OVER, **arguments: object
) -> IterationCosts:
    """The costs of iterations of a model with settings."""
    return iteration_costs(
        Serving(model=model, precision=precision, overheads=overheads), settings(**arguments), costs()
    )
