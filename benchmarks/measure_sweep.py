"""Measures every candidate of a spec with flagcore's own trials, and writes job records for replays.

    python benchmarks/measure_sweep.py SPEC OUT.jsonl [--rounds 2] [--quiet 0.25] [--again]

Each round has another random order, and no trial is stopped early. `rounds_s` are the median step times of the runs,
`others` are the shares of the processors that other processes used. A record's step time is the minimum of its runs,
because other load only slows a run down; `start_s` is the minimum time of a run outside its steps. A run with too much
other load is repeated once at the end of the round. Candidates that run out of memory have `oom`. The first round also
probes each candidate, as `flag tune` does with `control.probes`; `probe` has the ranks. The file is rewritten after
every run, and a later call adds to it.
"""

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
from flagcore_megatron.space.options import settings_in_force

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Problem
from flagcore.domain.space import Candidate
from flagcore.domain.trial import PROBE, RUN, Role, Trial, TrialState
from flagcore.spec.convert import parse_spec
from flagcore.spec.plain_data import spec_as_data
from flagcore.tuner.budget import time_limit
from flagcore.tuner.planner import predicted_trial
from flagcore.tuner.probe import probe
from flagcore.tuner.problem import build_problem
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure

SOURCE = "flagcore's own trials"
PUBLISHED = {
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "grad_reduce_in_bf16": False,
    "tp_comm_overlap": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""Settings of a job record that identify it as a run of the trial program."""


def main() -> None:
    """Measure all candidates, and write the records after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--quiet", type=float, default=0.25, help="maximum share of the processors that other processes may use"
    )
    parser.add_argument("--again", action="store_true", help="only what the file has already")
    options = parser.parse_args()
    data = spec_as_data(options.spec)
    spec = parse_spec(data, file=str(options.spec), base=options.spec.parent, engines=plugins.engines())
    engine = plugins.find_engine(spec.train.engine)
    with loaded_plugins(()) as loaded:
        problem = build_problem(spec, loaded, engine)
    for round_ in range(options.rounds):
        known = _records(options.out)
        rows = [row for row in range(len(problem.space)) if not options.again or _name(problem, row) in known]
        random.Random(round_).shuffle(rows)
        planned = len(rows)
        for index, row in enumerate(rows):  # the list grows by the rows to repeat
            trial, other_load = _run_trial(problem, row)
            if other_load > options.quiet and index < planned:
                rows.append(row)
            reported = trial.measurement.step_time_s if trial.measurement else trial.reason
            print(
                f"round {round_ + 1}, {index + 1}: {trial.candidate}: {reported}, others {other_load:.0%}",
                file=sys.stderr,
            )
            records = _records(options.out)
            record = _record(data, problem, row, trial, other_load, records)
            if "probe" not in record["measured"]:
                record["measured"]["probe"] = _probe_ranks(problem, trial.candidate)
            _write(options.out, {**records, record["id"]: record})


def _records(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {record["id"]: record for record in map(json.loads, lines)}


def _name(problem: Problem, row: int) -> str:
    return f"{problem.platform.task.spec.model.name}-{row:04d}"


def _run_trial(problem: Problem, row: int) -> tuple[Trial, float]:
    """Return a finished trial, and the share of the processors that other processes used."""
    launcher, candidate = plugins.launcher("local"), problem.space.candidate(row)
    trial = replace(predicted_trial(problem, candidate, Role.SEARCH, RUN), number=row)
    limit = time_limit(problem.platform, trial, ())
    began, others = time.monotonic(), _other_cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        running = launch(problem.platform, launcher, candidate, folder, limit)
        done = measure(running, problem.platform, trial, folder, None)
    took = (time.monotonic() - began) * (os.cpu_count() or 1)
    return done, max(0.0, (_other_cpu_seconds() - others) / took)


def _probe_ranks(problem: Problem, candidate: Candidate) -> list[dict[str, Any]]:
    """Return the results of the probes of a candidate's ranks as plain data."""
    limit = time_limit(problem.platform, predicted_trial(problem, candidate, Role.SEARCH, PROBE), ())
    with tempfile.TemporaryDirectory() as folder:
        launcher = plugins.launcher("local")
        results = probe(problem.platform, launcher, candidate, folder, limit, finish=False)
    return [
        {
            "rank": rank.rank,
            "state": rank.state.value,
            "reason": rank.reason,
            "duration_s": round(rank.duration_s, 2),
            "measured": {**asdict(rank.measured), "versions": {}} if rank.measured else None,
        }
        for rank in results.ranks
    ]


def _other_cpu_seconds() -> float:
    """Return the processor seconds so far of other processes than this one and its children."""
    every = psutil.cpu_times()
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return float(every.user + every.nice + every.system) - sum(use.ru_utime + use.ru_stime for use in own)


def _write(out: Path, records: dict[str, dict[str, Any]]) -> None:
    lines = [json.dumps(record) for _, record in sorted(records.items())]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _record(
    data: dict[str, Any],
    problem: Problem,
    row: int,
    trial: Trial,
    other_load: float,
    previous: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    task = problem.platform.task
    name = _name(problem, row)
    measured_values = previous.get(name, {}).get("measured", {})
    group, train = task.cluster.groups[0], task.spec.train
    settings = {key: settings_in_force(task.spec).get(key, value) for key, value in PUBLISHED.items()}
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
        "measured": _measured(trial, other_load, measured_values, task.spec.control.train_iters),
        "provenance": {
            "how": "benchmarks/measure_sweep.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "software": dict(trial.measurement.versions) if trial.measurement else {},
            "date": date.today().isoformat(),
            "memory_bytes_per_device": group.memory_bytes,
        },
    }


def _measured(trial: Trial, other_load: float, previous: dict[str, Any], iterations: int) -> dict[str, Any]:
    """Return the record of a candidate with the results of one more run."""
    if trial.state is not TrialState.MEASURED or trial.measurement is None:
        return previous or ({"oom": True} if trial.state is TrialState.OUT_OF_MEMORY else {"failed": trial.reason})
    result = trial.measurement
    medians = [*previous.get("rounds_s", ()), round(result.step_time_s, 5)]
    start = max(0.0, trial.duration_s - iterations * result.step_time_s)
    figures = {
        "step_time_s": min(medians),
        "rounds_s": medians,
        "others": [*previous.get("others", ()), round(other_load, 3)],
        "start_s": min(round(start, 2), previous.get("start_s", math.inf)),
    }
    sizes = {"peak_gib": result.peak_allocated_bytes, "device_used_gib": result.device_used_bytes}
    figures |= {name: round(size / 2**30, 4) for name, size in sizes.items() if size}
    return {**figures, "probe": previous["probe"]} if "probe" in previous else figures


if __name__ == "__main__":
    main()
