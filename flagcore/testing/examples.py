"""A small task, and a chip that no plugin knows, for tests of plugins."""

from __future__ import annotations

from flagcore.domain.chip import Chip
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model
from flagcore.domain.spec import ClusterSpec, Spec, Task, TrainSpec

FOREIGN_CHIP = Chip(name="chip of nobody", vendor="nobody")

MODEL = Model(
    name="small",
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=704,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=64,
    vocab_size=4096,
)


def group_of(chip: Chip, devices: int = 8) -> NodeGroup:
    """Return one node of `chip`."""
    return NodeGroup(chip=chip, nodes=1, devices_per_node=devices)


def task_on(chip: Chip, devices: int = 8) -> Task:
    """Return a training task of a small model on one node of `chip`."""
    train = TrainSpec(engine="megatron", seq_length=128, global_batch_size=16, precision="bf16")
    spec = Spec(model=MODEL, cluster=ClusterSpec(chip=chip.name), work=train)
    return Task(spec=spec, cluster=Cluster(groups=(group_of(chip, devices),)))
