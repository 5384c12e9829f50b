"""Measures predicted server candidates per minute, and the speedup over real runs.

    python benchmarks/serving_speed.py

Each load is simulated for 400 settings with different limits of the scheduler, for a model of 8 billion parameters in
bf16 on a fictitious accelerator of 1 PFLOP/s and 4.8 TB/s. The time is the processor time of one core with set-up.
"""

import json
import time
from dataclasses import replace

import numpy as np
from flagcore_serving.job import Load, ServeSpec
from flagcore_serving.model.predict import predict
from flagcore_serving.space.settings import GRAPH_TOKENS, Settings
from flagcore_vllm.engine import ENGINE as ENGINE

from flagcore.contracts import Costs
from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.roofline import PlainMemory, Roofline

SOURCE = Source(kind="estimated", detail="round figures")
CHIP = Chip(
    name="made-up",
    vendor="nobody",
    memory_bytes=Fact(value=140e9, source=SOURCE),
    memory_bandwidth_bytes_per_second=Fact(value=4.8e12, source=SOURCE),
    dense_flops_per_second={"bf16": Fact(value=1e15, source=SOURCE)},
)
MODEL = Model(
    name="8b",
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=151936,
)
LOADS = {
    "32 clients, 1024 to 128 tokens": Load(input_len=1024, output_len=128, concurrency=32, num_prompts=128),
    "64 clients, 1024 to 1024 tokens": Load(input_len=1024, output_len=1024, concurrency=64, num_prompts=256),
    "256 clients, 4096 to 512 tokens": Load(input_len=4096, output_len=512, concurrency=256, num_prompts=1000),
    "20 a second, 1024 to 256 tokens": Load(input_len=1024, output_len=256, request_rate=20.0, num_prompts=500),
}
ROWS = 400


def settings(task: Task) -> Settings:
    """Return candidates that are distinct for every load."""
    columns = {"instances": np.ones(ROWS, dtype=np.int64), "context_len": np.full(ROWS, 8192)}
    sizes = {"block_size": 16, "graph_tokens": GRAPH_TOKENS, "memory_fraction": 0.9, "cache_element_bytes": 2.0}
    sizes["pass_tokens"] = 65536.0
    return Settings.of(
        task,
        columns,
        max_running=1 + np.arange(ROWS) % 20,
        max_batched_tokens=1024 + 256 * (np.arange(ROWS) // 20),
        **{name: np.full(ROWS, value) for name, value in sizes.items()},
    )


def main() -> None:
    """Print the results of each load, and all results as JSON on the last line."""
    group = NodeGroup(chip=CHIP, nodes=1, devices_per_node=1)
    collectives = Collectives(topology=topology_of(group))
    costs = Costs(memory=PlainMemory.of(group), kernels=Roofline(chip=CHIP), collectives=collectives)
    spec = Spec(
        model=MODEL, cluster=ClusterSpec(), work=ServeSpec(engine="vllm", loads=()), objective="output_tokens_per_s"
    )
    figures = {}
    for name, load in LOADS.items():
        task = Task(spec=replace(spec, work=replace(spec.serve, loads=(load,))), cluster=Cluster(groups=(group,)))
        start = time.process_time()
        found = predict(task, settings(task), costs, ENGINE.overheads_for(task, on_host=False))
        spent = time.process_time() - start
        served = float(((load.num_prompts or 0) / found.figures["requests_per_s"]).sum())
        figures[name] = {"candidates_per_minute": ROWS / spent * 60, "times_faster": served / spent}
        row = figures[name]
        print(
            f"{name}: {row['candidates_per_minute']:,.0f} candidates a minute, {row['times_faster']:,.0f} x real time"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
