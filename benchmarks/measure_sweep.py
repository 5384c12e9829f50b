"""Measure every candidate of a spec with flagcore's own trials, into job records that can be replayed.

    python benchmarks/measure_sweep.py SPEC OUT.jsonl [--rounds 2]

Candidates run in another random order each round, none is ended early. `rounds_s` are the medians of the steps of each
run; a record's step time is the least of them, since other work on the machine can only make a run slower. What runs
out of memory is kept as `oom`. The file is written anew after every run, and a later call adds rounds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.telling import loaded_plugins
from flagcore.contracts import Workload
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.problem import Problem, pose
from flagcore.spec import parse_spec, spec_as_data
from flagcore.stages.launch import launch
from flagcore.stages.measure import measure
from flagcore.workloads.megatron.options import settings_in_force

SOURCE = "flagcore's own trials"
PUBLISHED = {
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "grad_reduce_in_bf16": False,
    "tp_comm_overlap": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""What a job record must say, or it is taken for a tuned run of Megatron-LM."""


def main() -> None:
    """Measure, and write after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    data = spec_as_data(given.spec)
    spec = parse_spec(data, file=str(given.spec), base=given.spec.parent)
    workload, runs = plugins.workload(spec.train.engine), defaultdict[int, list[Trial]](list)
    before = _records(given.out)
    first = max((len(each["measured"].get("rounds_s", ())) for each in before.values()), default=0)
    with loaded_plugins(()) as loaded:
        problem = pose(spec, loaded, workload)
        for round_ in range(first, first + given.rounds):
            rows = list(range(len(problem.space)))
            random.Random(round_).shuffle(rows)
            for place, row in enumerate(rows):
                done = _run(problem, workload, row)
                runs[row].append(done)
                told = done.measurement.step_time_s if done.measurement else done.reason
                print(f"round {round_ + 1}, {place + 1} of {len(rows)}: {done.candidate}: {told}", file=sys.stderr)
                record = _record(data, problem, row, runs[row], before)
                _write(given.out, {**_records(given.out), record["id"]: record})


def _records(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def _run(problem: Problem, workload: Workload, row: int) -> Trial:
    launcher, candidate = plugins.launcher("local"), problem.space.candidate(row)
    trial = Trial(number=row, candidate=candidate, role=Role.SEARCH, state=TrialState.RUNNING)
    seconds = problem.platform.task.spec.control.max_time_per_task
    with tempfile.TemporaryDirectory() as folder:
        running = launch(problem.platform, workload, launcher, candidate, folder, seconds)
        return measure(running, problem.platform, workload, trial, folder, None)


def _write(out: Path, records: dict[str, dict[str, Any]]) -> None:
    lines = [json.dumps(record) for _, record in sorted(records.items())]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _record(
    data: dict[str, Any], problem: Problem, row: int, trials: list[Trial], before: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    task, name = problem.platform.task, f"{problem.platform.task.spec.model.name}-{row:04d}"
    earlier = before.get(name, {}).get("measured", {}).get("rounds_s", [])
    group, train = task.cluster.groups[0], task.spec.train
    measured = [trial.measurement for trial in trials if trial.state is TrialState.MEASURED and trial.measurement]
    settings = {key: settings_in_force(train).get(key, value) for key, value in PUBLISHED.items()}
    return {
        "id": name,
        "source": SOURCE,
        "kind": "train",
        "model": data["model"],
        "cluster": {
            "chip": group.chip.name,
            "devices": task.cluster.devices,
            "devices_per_node": group.devices_per_node,
            "memory_bytes_per_device": group.memory_bytes,
        },
        "train": {
            "seq_length": train.seq_length,
            "global_batch_size": train.global_batch_size,
            "precision": train.precision,
            "attention": train.attention,
            "implementation": train.implementation or "local",
            **train.settings,
            **settings,
        },
        "candidate": {knob: value for knob, value in problem.space.candidate(row).items if value is not None},
        "measured": _figures(measured, earlier) if measured else _failure(trials),
        "provenance": {
            "how": "benchmarks/measure_sweep.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "software": dict(measured[0].versions) if measured else {},
            "date": date.today().isoformat(),
        },
    }


def _figures(measured: list[Measurement], earlier: list[float]) -> dict[str, Any]:
    medians = [*earlier, *(round(each.step_time_s, 5) for each in measured)]
    figures: dict[str, Any] = {"step_time_s": min(medians), "rounds_s": medians}
    peaks = [each.peak_allocated_bytes for each in measured if each.peak_allocated_bytes]
    return figures | ({"peak_gib": round(max(peaks) / 2**30, 4)} if peaks else {})


def _failure(trials: list[Trial]) -> dict[str, Any]:
    out_of_memory = any(trial.state is TrialState.OUT_OF_MEMORY for trial in trials)
    return {"oom": True} if out_of_memory else {"failed": trials[-1].reason}


if __name__ == "__main__":
    main()
