"""Measure every candidate of a spec with flagcore's own trials, into job records that can be replayed.

    python benchmarks/measure_sweep.py SPEC OUT.jsonl [--rounds 2] [--quiet 0.25] [--again]

Candidates run in another random order each round, none is ended early. `rounds_s` are the medians of the steps of each
run, `others` what share of the machine's processors other work took meanwhile; a record's step time is the least of
them, since other work can only make a run slower, and `start_s` the least that a run took beside its steps. A run
beside too much of it is repeated once at the end of a round. What runs out of memory is kept as `oom`. In its first
round a candidate is probed, too, as `flag tune` does with `control.probes`: `probe` has its ranks. The file is written
anew after every run, and a later call adds to it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from flagcore import plugins
from flagcore.api.common.inputs import loaded_plugins
from flagcore.contracts import Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.trial import PROBE, RUN, Role, Trial, TrialState
from flagcore.engines.megatron.options import settings_in_force
from flagcore.problem import Problem, build_problem
from flagcore.spec import parse_spec, spec_as_data
from flagcore.stages.launch import launch
from flagcore.stages.measure import measure
from flagcore.stages.probe import probe
from flagcore.trial_plan import plan_time_limit, predicted_trial

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
    parser.add_argument("--quiet", type=float, default=0.25, help="share of the processors that others may take")
    parser.add_argument("--again", action="store_true", help="only what the file has already")
    given = parser.parse_args()
    data = spec_as_data(given.spec)
    spec = parse_spec(data, file=str(given.spec), base=given.spec.parent, engines=plugins.engines())
    workload = plugins.workload(spec.train.engine)
    with loaded_plugins(()) as loaded:
        problem = build_problem(spec, loaded, workload)
    for round_ in range(given.rounds):
        known = _records(given.out)
        rows = [row for row in range(len(problem.space)) if not given.again or _name(problem, row) in known]
        random.Random(round_).shuffle(rows)
        planned = len(rows)
        for place, row in enumerate(rows):  # which grows by those to repeat
            done, others = _run(problem, workload, row)
            if others > given.quiet and place < planned:
                rows.append(row)
            reported = done.measurement.step_time_s if done.measurement else done.reason
            print(
                f"round {round_ + 1}, {place + 1}: {done.candidate}: {reported}, others {others:.0%}", file=sys.stderr
            )
            records = _records(given.out)
            record = _record(data, problem, row, done, others, records)
            if "probe" not in record["measured"]:
                record["measured"]["probe"] = _probed(problem, workload, done.candidate)
            _write(given.out, {**records, record["id"]: record})


def _records(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def _name(problem: Problem, row: int) -> str:
    return f"{problem.platform.task.spec.model.name}-{row:04d}"


def _run(problem: Problem, workload: Workload, row: int) -> tuple[Trial, float]:
    """Return a finished trial, and the share of the processors that others took meanwhile."""
    launcher, candidate = plugins.launcher("local"), problem.space.candidate(row)
    trial = replace(predicted_trial(problem, workload, candidate, Role.SEARCH, RUN), number=row)
    limit = plan_time_limit(problem, workload, trial, ())
    began, others = time.monotonic(), _others()
    with tempfile.TemporaryDirectory() as folder:
        running = launch(problem.platform, workload, launcher, candidate, folder, limit)
        done = measure(running, problem.platform, workload, trial, folder, None)
    took = (time.monotonic() - began) * (os.cpu_count() or 1)
    return done, max(0.0, (_others() - others) / took)


def _probed(problem: Problem, workload: Workload, candidate: Candidate) -> list[dict[str, Any]]:
    """Return what probes of a candidate's ranks reported, as plain data."""
    limit = plan_time_limit(problem, workload, predicted_trial(problem, workload, candidate, Role.SEARCH, PROBE), ())
    with tempfile.TemporaryDirectory() as folder:
        launcher = plugins.launcher("local")
        found = probe(problem.platform, workload, launcher, candidate, folder, limit, finish=False)
    return [
        {
            "rank": rank.rank,
            "state": rank.state.value,
            "reason": rank.reason,
            "duration_s": round(rank.duration_s, 2),
            "measured": {**asdict(rank.measured), "versions": {}} if rank.measured else None,
        }
        for rank in found.ranks
    ]


def _others() -> float:
    """Return the processor seconds so far that neither this process nor its children used."""
    every = psutil.cpu_times()
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return float(every.user + every.nice + every.system) - sum(use.ru_utime + use.ru_stime for use in own)


def _write(out: Path, records: dict[str, dict[str, Any]]) -> None:
    lines = [json.dumps(record) for _, record in sorted(records.items())]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _record(
    data: dict[str, Any], problem: Problem, row: int, done: Trial, others: float, before: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    task = problem.platform.task
    name = _name(problem, row)
    known = before.get(name, {}).get("measured", {})
    group, train = task.cluster.groups[0], task.spec.train
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
        "measured": _measured(done, others, known, task.spec.control.train_iters),
        "provenance": {
            "how": "benchmarks/measure_sweep.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "software": dict(done.measurement.versions) if done.measurement else {},
            "date": date.today().isoformat(),
            "memory_bytes_per_device": group.memory_bytes,
        },
    }


def _measured(done: Trial, others: float, known: dict[str, Any], iterations: int) -> dict[str, Any]:
    """Return the figures of a candidate with those of one more run."""
    if done.state is not TrialState.MEASURED or done.measurement is None:
        return known or ({"oom": True} if done.state is TrialState.OUT_OF_MEMORY else {"failed": done.reason})
    measured = done.measurement
    medians = [*known.get("rounds_s", ()), round(measured.step_time_s, 5)]
    start = max(0.0, done.duration_s - iterations * measured.step_time_s)
    figures = {
        "step_time_s": min(medians),
        "rounds_s": medians,
        "others": [*known.get("others", ()), round(others, 3)],
        "start_s": min(round(start, 2), known.get("start_s", math.inf)),
    }
    sizes = {"peak_gib": measured.peak_allocated_bytes, "device_used_gib": measured.device_used_bytes}
    figures |= {name: round(size / 2**30, 4) for name, size in sizes.items() if size}
    return {**figures, "probe": known["probe"]} if "probe" in known else figures


if __name__ == "__main__":
    main()
