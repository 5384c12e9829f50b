"""Test data for checks of plugins: a small task, a chip that no plugin lists, and arguments for every hook."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model
from flagcore.domain.spec import ClusterSpec, Spec, Task, TrainSpec
from flagcore.plugins import ENGINES, kind_of, kinds, names

FOREIGN_CHIP = Chip(name="foreign chip", vendor="another vendor")

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


def group_of(chip: Chip) -> NodeGroup:
    """Return a node group of one node with eight devices of `chip`."""
    return NodeGroup(chip=chip, nodes=1, devices_per_node=8)


def task_on(chip: Chip, engine: str = "megatron") -> Task:
    """Return a task of `engine` with a small model on one node of `chip`. An engine that is not installed trains."""
    spec = Spec(model=MODEL, cluster=ClusterSpec(chip=chip.name), work=_work(engine, kind_of(engine)))
    return Task(spec=spec, cluster=Cluster(groups=(group_of(chip),)))


@cache  # a plugin has tasks for each of its chips
def _work(engine: str, kind: str) -> Any:
    job = kinds().get(kind, TrainSpec)
    sizes: Any = {"seq_length": 128, "global_batch_size": 16} if job is TrainSpec else {"loads": ()}
    return job(engine=engine, precision="bf16", **getattr(job, "example", sizes))


def example_calls(chip: Chip) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield each hook that takes a chip or an engine, with its arguments. A hook that takes an engine is yielded per
    engine."""
    group, task = group_of(chip), task_on(chip)
    yield "flagcore_topology", {"group": group}
    yield "flagcore_telemetry", {"device": Device(index=0, chip=chip.name)}
    for engine in names(ENGINES):
        engine_arguments = {"chip": chip, "engine": engine, "engine_version": None}
        kind = kind_of(engine)
        yield "flagcore_check_task", {"task": task_on(chip, engine), "engine_version": None}
        yield "flagcore_memory_model", {"group": group, "engine": engine, "kind": kind}
        yield "flagcore_kernel_costs", {"chip": chip, "engine": engine, "kind": kind}
        yield "flagcore_collective_costs", {"group": group, "engine": engine}
        yield "flagcore_engine_support", {**engine_arguments, "kind": kind}
        yield "flagcore_knobs", engine_arguments
        yield "flagcore_environment", {**engine_arguments, "task": task, "kind": kind}
