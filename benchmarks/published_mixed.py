"""Published figures of jobs on several kinds of chips beside predictions: prints tables of benchmarks/README.md.

    python benchmarks/published_mixed.py build/megatron-lm/flag_scale/examples

The folder has FlagScale's examples.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from flagcore import api
from flagcore.api.snapshot import build_problem_of_spec
from flagcore.domain.effects import effects_of_row, engine_task
from flagcore.domain.prediction import Passes, idle_of
from flagcore.engines.training.schedules import pipeline_seconds

HETERO = "train.system.hetero"
MEMORY: Mapping[str, tuple[Sequence[str], str, int, int]] = {
    "TP 2, DP 2, EP 2, twice, 12/12": (("2,1,2,2,1", "2,1,2,2,1"), "12,12", 1, 52178),
    "the same, expert TP 2": (("2,1,2,2,1", "2,1,2,2,1"), "12,12", 2, 37814),
    "DP 4, EP 2 + DP 4, EP 4, 13/11": (("1,1,2,4,1", "1,1,4,4,1"), "13,11", 1, 58302),
    "DP 4, EP 4 + DP 2, EP 2, twice, 11/6/7": (("1,1,4,4,1", "1,1,2,2,1", "1,1,2,2,1"), "11,6,7", 1, 61422),
}
"""Meshes (TP, CP, EP, DP, PP), layers, expert TP, and the MiB reserved on rank 0 in FlagScale's pull request 395."""
BUBBLES: Mapping[str, tuple[float, ...]] = {
    "vh45, 760M": (38.9, 34.4, 34.3, 33.1),
    "vh45, 1.3B": (39.3, 33.8, 29.4, 26.7),
    "hh55, 760M": (29.0, 20.9, 12.9, 12.5),
    "hh55, 1.3B": (32.9, 26.1, 23.4, 22.5),
}
"""Published bubbles in percent of each schedule in `SCHEDULES`."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1))


def memory(examples: Path) -> Iterator[str]:
    """Yield the rows of the memory of rank 0."""
    for name, (meshes, layers, expert, published) in MEMORY.items():
        values = {
            "hetero_process_meshes": ",".join(meshes),
            "hetero_pipeline_layer_split": layers,
            "expert_tensor_parallel_size_per_process_mesh": ",".join([str(expert)] * len(meshes)),
            "hetero_device_types": ",".join(["A800"] * len(meshes)),
        }
        overrides = [f"{HETERO}.{key}=[{value}]" for key, value in values.items()]
        overrides += [f"train.system.pipeline_model_parallel_size={len(meshes)}"]
        overrides += [f"train.system.tensor_model_parallel_size={meshes[0][0]}", "++train.data.data_path=/data"]
        overrides += [f"train.system.expert_tensor_parallel_size={expert}", "++train.data.tokenizer.vocab_size=129280"]
        overrides += ["++experiment.runner.nnodes=1", "++experiment.runner.nproc_per_node=8"]
        data = api.read_tree(examples / "deepseek_v3" / "conf", "train_hetero", overrides).data
        problem = build_problem_of_spec(data, None, (), None, plan=True)
        columns = problem.space.columns(np.array([problem.space.find(problem.baseline)]))
        task = problem.platform.task
        task = engine_task(task, effects_of_row(task, columns))
        reserved = problem.workload.rank(task, columns, 0, problem.costs).reserved_bytes / 2**20
        yield f"| {name} | {published} | {reserved:.0f} | {reserved / published - 1:+.0%} |"


def bubbles(schedule: str, virtual: int, fast: int, slow: int, batches: int, times: float, head: float) -> float:
    """Return the idle share in percent of a pipeline with even layers, whose last stages are slower; `head` is the time
    of the loss relative to a stage.
    """
    forward = [1.0] * fast + [times] * slow
    forward[-1] *= 1.0 + head
    seconds: dict[str, Any] = {"forward_s": tuple(forward), "weight_s": tuple(forward), "send_s": 0.0}
    seconds["backward_s"] = tuple(2.0 * each for each in forward)
    passes = Passes(schedule=schedule, microbatches=batches, virtual=virtual, sender_waits=False, **seconds)
    return 100.0 * (1.0 - 3.0 * batches * sum(forward) / len(forward) / pipeline_seconds(passes))


def fitted(name: str, published: Sequence[float]) -> str:
    """Return the row of a cluster: the assumptions with the smallest largest error."""
    slow = (0,) if name.startswith("hh") else (4, 5)
    times = (1.0,) if slow == (0,) else (1.2, 1.5, 1.8, 2.1, 2.5, 3.0, 4.0)
    best: tuple[float, str, list[float]] = (np.inf, "", [])
    for stages, late, each, ratio, head in product((8, 9, 10), slow, (1, 2, 3, 4), times, (0.0, 0.1, 0.2, 0.35, 0.5)):
        found = [bubbles(*kind, stages - late, late, each * stages, ratio, head) for kind in SCHEDULES]
        error = max(abs(one - other) for one, other in zip(found, published, strict=True))
        text = f"{stages} stages, {late} of them {ratio} x slower" if late else f"{stages} equal stages"
        if error < best[0]:
            best = error, f"{text}; {each * stages} micro-batches; loss {head:.0%} of a stage", found
    pairs = (f"{one} / {other:.1f}" for one, other in zip(published, best[2], strict=True))
    return f"| {name} | {' | '.join(pairs)} | {best[1]} | {best[0]:.1f} |"


def layouts(examples: Path) -> Iterator[str]:
    """Yield the rows of layouts that FlagScale ships, with the balanced split of the same meshes."""
    group = {"nodes": 1, "devices_per_node": 8, "nic_bytes_per_second": 2.5e10}
    llama = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    llama |= {"num_query_groups": 8, "vocab_size": 128256}
    aquila = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    aquila |= {"num_query_groups": 8, "vocab_size": 100008}
    jobs: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]], str, str, int]] = {
        "Llama 3 8B, A800 + A100, 18/14": (
            llama,
            [{**group, "chip": "A800-80GB"}, {**group, "chip": "A100-80GB"}],
            "A800-80GB tp2 dp4 + A100-80GB tp4 dp2",
            "Et*18|t*14L",
            256,
        ),
        "Aquila 70B, 16 nodes A800 + 48 nodes A100-40GB, 20/20/20/20": (
            aquila,
            [{**group, "chip": "A800-80GB", "nodes": 16}, {**group, "chip": "A100-40GB", "nodes": 48}],
            "A800-80GB tp8 dp16 + A100-40GB tp8 dp16 pp3",
            "Et*20|t*20|t*20|t*20L",
            1024,
        ),
        "Aquila 70B, 10 nodes BI-V100 + 1 node A800, 20 x 2 + 2 x 20": (
            aquila,
            [{**group, "chip": "BI-V100", "nodes": 10}, {**group, "chip": "A800-80GB"}],
            "BI-V100 tp4 pp20 full + A800-80GB tp4 pp2",
            f"E{'|'.join(['t*2'] * 20)}|t*20|t*20L",
            2048,
        ),
    }
    for name, (model, groups, meshes, layout, batch) in jobs.items():
        work = {"engine": "megatron", "seq_length": 4096, "global_batch_size": batch, "precision": "bf16"}
        work["settings"] = {"pipeline_model_parallel_layout": layout}
        space = {"meshes": [meshes], "micro_batch_size": [1], "use_distributed_optimizer": [True]}
        spec = {"model": model, "cluster": {"groups": groups}, "train": work, "auto_tuner": {"space": space}}
        problem = build_problem_of_spec(spec, None, (), None, plan=True)
        workload = problem.workload
        space_columns = problem.space.columns(np.arange(len(problem.space)))
        row = int(np.flatnonzero(space_columns["meshes"])[0])
        columns, costs = problem.space.columns(np.array([row])), problem.platform.costs
        task = engine_task(problem.platform.task, effects_of_row(problem.platform.task, columns))
        balanced = workload.with_derived_split(task, columns)
        yield f"| {name} | {_result(workload, task, columns, costs)} | {_result(workload, *balanced, costs)} |"


def _result(workload: Any, task: Any, columns: Any, costs: Any) -> str:
    """Return the layers, the step time, the memory in use and the idle share of each kind."""
    predicted, pipelines = workload.predict(task, columns, costs), workload.pipelines(task, columns, costs)
    used, capacity = (float(each[0]) / 2**30 for each in (predicted.device_used_bytes, predicted.capacity_bytes))
    idle = ", ".join(f"{group.title} {idle_of(pipelines, n):.0%}" for n, group in enumerate(task.cluster.groups))
    layers = "/".join(map(str, pipelines[0].layers))
    return f"{layers} | {float(predicted.step_time_s[0]):.4g} s | {used:.1f} of {capacity:.0f} GiB | {idle}"


if __name__ == "__main__":
    examples = Path(sys.argv[1])
    for rows in (layouts(examples), memory(examples), (fitted(*each) for each in BUBBLES.items())):
        print(*rows, sep="\n", end="\n\n")
