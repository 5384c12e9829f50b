"""How fast a space is built and predicted: raw combinations and candidates a second, and the memory it takes."""

from __future__ import annotations

import json
import os
import platform
import resource
import time

from flagcore.contracts import Costs
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.cluster import Cluster, NodeGroup, Topology
from flagcore.domain.model import Model
from flagcore.domain.spec import ClusterSpec, Spec, Task, TrainSpec
from flagcore.physics.collectives import Collectives
from flagcore.physics.memory import PlainMemory
from flagcore.physics.roofline import Roofline
from flagcore.stages.build import build
from flagcore.stages.predict import predict
from flagcore.workloads.megatron import WORKLOAD

ASSUMED = Source(kind="estimated", detail="a round figure, for speed only")


def main() -> None:
    """Print one JSON object: a dense and a mixture-of-experts space."""
    figures = {name: _figures(task) for name, task in (("dense", _task(None)), ("moe", _task(64)))}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"machine": f"{platform.machine()}, {os.cpu_count()} cores", "peak_mib": round(peak), **figures}))


def _figures(task: Task) -> dict[str, float]:
    start = time.perf_counter()
    space = build(WORKLOAD.axes(task), WORKLOAD.rules(task), WORKLOAD.merges(task))
    built = time.perf_counter()
    costs = Costs(
        memory=PlainMemory(capacity=80e9),
        kernels=Roofline(chip=task.cluster.groups[0].chip),
        collectives=Collectives(topology=Topology(levels=())),
    )
    predict(task, WORKLOAD, space, costs)
    predicted = time.perf_counter()
    return {
        "combinations": space.combinations,
        "candidates": len(space),
        "build_s": round(built - start, 2),
        "predict_s": round(predicted - built, 2),
        "candidates_predicted_per_second": round(len(space) / (predicted - built)),
    }


def _task(experts: int | None) -> Task:
    model = Model(
        name="bench",
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=25600,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=151936,
        num_moe_experts=experts,
        moe_router_topk=8 if experts else 0,
        moe_ffn_hidden_size=2048 if experts else None,
    )
    chip = Chip(
        name="bench",
        vendor="bench",
        memory_bytes=Fact(value=80e9, source=ASSUMED),
        memory_bandwidth_bytes_per_second=Fact(value=2e12, source=ASSUMED),
        dense_flops_per_second={"bf16": Fact(value=3e14, source=ASSUMED)},
    )
    train = TrainSpec(engine="megatron", seq_length=4096, global_batch_size=1024, precision="bf16")
    return Task(
        spec=Spec(model=model, cluster=ClusterSpec(), train=train),
        cluster=Cluster(groups=(NodeGroup(chip=chip, nodes=128, devices_per_node=8),)),
    )


if __name__ == "__main__":
    main()
