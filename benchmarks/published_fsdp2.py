"""Compares predictions of trainers with the runs in `published_fsdp2.jsonl`, also of DeepSpeed. No constant was fitted.

The sequence length and the checkpoints are those of torchtitan's configurations of the models. `chip_changes`: what the
hosts of a run have instead of the chip's rates. The power limit of torchtitan's H100 is 500 W; its pages say that the
peak lies between those of two other models, whose mean is used. `program`: what the run's release did otherwise.
Runs with asynchronous tensor parallelism are left out. `memory_gib` is what the allocator reserved. DeepSpeed's runs
are of LLaMA 7B and GPT-2 XL in transformers; `recompute` is 2 with checkpoints.
"""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_trainers.fully_shard import predict as prediction
from flagcore_trainers.fully_shard.traffic import TORCHTITAN
from flagcore_vendorkit import chip_file

from flagcore.api.inputs import open_spec
from flagcore.contracts import Costs
from flagcore.domain.spec import Task


def predicted(run: dict[str, Any]) -> Any:
    """Return the prediction of a run."""
    nodes = max(run["devices"] // 8, 1)
    keys = ("seq_length", "global_batch_size", "precision", "attention")
    train = {"engine": run.get("engine", "fsdp2"), **{key: run[key] for key in keys if key in run}}
    if "recompute" in run:
        sizes = {"values": sorted({1, run["candidate"]["micro_batch_size"]}), "key": "train_micro_batch_size_per_gpu"}
        train["program"] = {"fixed": {"recompute": run["recompute"]}, "knobs": {"micro_batch_size": sizes}}
        Path(tempfile.gettempdir(), "ds.json").write_text("{}")
        train |= {"command": ["deepspeed", "--deepspeed", "ds.json"], "directory": tempfile.gettempdir()}
    spec = {"model": run["model"], "train": train}
    spec["cluster"] = {"chip": run["chip"], "nodes": nodes, "devices_per_node": run["devices"] // nodes}
    platform = open_spec(spec, None, (), plan=True).problem.platform
    engine, task = platform.engine, platform.task
    values = {knob.name: run["candidate"].get(knob.name, knob.neutral) for knob in engine.knobs}
    columns = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in engine.knobs}
    broken = [rule.name for rule in engine.rules(task) if rule.broken(columns).any()]
    assert not broken, broken
    task, costs = changed(task, platform.costs, run.get("chip_changes", {}))
    if "attention_kernel" in run:
        (group,) = task.cluster.groups
        chip = replace(group.chip, architecture="")  # no limit of FlashAttention-2
        task = replace(task, cluster=replace(task.cluster, groups=(replace(group, chip=chip),)))
    if "recompute" in run:
        return engine.predict(task, columns, costs)
    return prediction.predict(task, columns, costs, replace(TORCHTITAN, **run.get("program", {})))


def changed(task: Task, costs: Costs, changes: dict[str, float]) -> tuple[Task, Costs]:
    """Return a task and its costs with other rates of the chip: `bandwidth` in bytes per second, `peak` as a share."""
    if not changes:
        return task, costs
    (group, *_others) = task.cluster.groups
    rates = {
        name: replace(each, value=each.value * changes["peak"])
        for name, each in group.chip.dense_flops_per_second.items()
    }
    bandwidth = replace(group.chip.memory_bandwidth_bytes_per_second, value=changes["bandwidth"])
    chip = replace(group.chip, dense_flops_per_second=rates, memory_bandwidth_bytes_per_second=bandwidth)
    kernels = chip_file.kernel_costs(f"flagcore_{chip.vendor}", chip)
    assert kernels is not None
    cluster = replace(task.cluster, groups=(replace(group, chip=chip),))
    return replace(task, cluster=cluster), replace(costs, kernels=kernels)


def main() -> None:
    """Print a line per run, and the median errors of all runs and of those of each source."""
    errors: dict[str, list[float]] = {}
    for line in Path(__file__).with_name("published_fsdp2.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        found = predicted(run)
        tokens = run["seq_length"] * run["global_batch_size"] / run["devices"]
        time = float(found.step_time_s[0]) * run["tokens_per_second_per_device"] / tokens
        kind = run.get("engine", "fsdp2") + " (weak)" * ("weak" in run)
        names, text = [f"time of {kind}", f"time {run['source'].split(',')[0]}"], f"time {time:.2f}"
        for name in names:
            errors.setdefault(name, []).append(abs(time - 1.0))
        if published := run.get("memory_gib"):
            memory = float(found.reserved_bytes[0]) / 2**30 / published
            errors.setdefault(f"memory of {kind}", []).append(abs(memory - 1.0))
            text += f" memory {memory:.2f}"
        parts = {name: round(float(each[0]), 3) for name, each in found.time_s.items() if each[0]}
        model = run["model"] if isinstance(run["model"], str) else run["model"]["name"]
        job = f"{run['devices']} {run['chip']} {model} {run['precision']} seq {run['seq_length']} {run['candidate']}"
        print(f"{text} of the published  {job} {parts}")
    print({name: (round(statistics.median(each), 3), len(each)) for name, each in errors.items()})


if __name__ == "__main__":
    main()
