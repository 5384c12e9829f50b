"""Compares predictions of the engine `fsdp2` with the runs in `published_fsdp2.jsonl`. No constant was fitted to them.

The sequence length and the checkpoints are those of torchtitan's configurations of the models. The hosts of the H100
runs have the 96 GB model with a power limit of 500 W, which is slower than the chip of the predictions. Runs with
pipelines and with asynchronous tensor parallelism are left out. Not predicted: what differs between torchtitan's model
and the trial program, such as complex rotary embeddings.
"""

import json
import statistics
from pathlib import Path

import numpy as np

from flagcore.api.planning.estimate import build_problem_of_spec


def main() -> None:
    """Print a line per run, and the median errors."""
    errors: dict[str, list[float]] = {"time": [], "memory": []}
    for line in Path(__file__).with_name("published_fsdp2.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        nodes = max(run["devices"] // 8, 1)
        keys = ("seq_length", "global_batch_size", "precision")
        train = {"engine": "fsdp2", **{key: run[key] for key in keys}}
        spec = {"model": run["model"], "train": train}
        spec["cluster"] = {"chip": run["chip"], "nodes": nodes, "devices_per_node": run["devices"] // nodes}
        platform = build_problem_of_spec(spec, None, (), plan=True).platform
        engine, task = platform.workload, platform.task
        values = {knob.name: run["candidate"].get(knob.name, knob.neutral) for knob in engine.knobs}
        columns = {knob.name: np.array([knob.axis(()).encode(values[knob.name])]) for knob in engine.knobs}
        broken = [rule.name for rule in engine.rules(task) if rule.broken(columns).any()]
        assert not broken, broken
        predicted = engine.predict(task, columns, platform.costs)
        tokens = run["seq_length"] * run["global_batch_size"] / run["devices"]
        time = float(predicted.step_time_s[0]) * run["tokens_per_second_per_device"] / tokens
        memory = float(predicted.reserved_bytes[0]) / 2**30 / run["memory_gib"]
        errors["time"].append(abs(time - 1.0))
        errors["memory"].append(abs(memory - 1.0))
        parts = {name: round(float(each[0]), 3) for name, each in predicted.time_s.items() if each[0]}
        kind = f"{run['devices']} {run['chip']} {run['precision']} seq {run['seq_length']} {run['candidate']}"
        print(f"time {time:.2f} memory {memory:.2f} of the published  {kind} {parts}")
    print({name: round(statistics.median(each), 3) for name, each in errors.items()})


if __name__ == "__main__":
    main()
