"""Runs every candidate of a spec, and then `flag tune` on it: how good its winner is, and what it cost.

    python benchmarks/brute_force.py scan SPEC OUT.json [--seed 1] [--first 2]
    python benchmarks/brute_force.py tune SPEC OUT.json

A call of `scan` adds one run of each candidate, in random order, by the trials that `flag tune` uses; none is stopped
early. `tune` takes the defaults of the spec and no earlier runs, and prints both.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore import api, plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.domain.trial import RUN, Role
from flagcore.spec.convert import parse_spec
from flagcore.spec.plain_data import spec_as_data
from flagcore.tuner.budget import time_limit
from flagcore.tuner.planner import predicted_trial
from flagcore.tuner.problem import build_problem
from flagcore.tuner.stages.launch import launch
from flagcore.tuner.stages.measure import measure


def main() -> None:
    """Scan, or tune and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("scan", "tune"))
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument("--first", type=int, help="only so many candidates")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {"scan_s": [], "runs": {}}
    if options.action == "scan":
        _scan(options, found)
    else:
        _tune(options, found)
    options.out.write_text(json.dumps(found, indent=1))


def _scan(options: argparse.Namespace, found: dict[str, Any]) -> None:
    data = spec_as_data(options.spec)
    spec = parse_spec(data, file=str(options.spec), base=options.spec.parent, engines=plugins.engines())
    engine = plugins.find_engine(spec.train.engine)
    engine = engine.with_program(spec.train.program)
    began = time.monotonic()
    with loaded_plugins(()) as loaded:
        problem = build_problem(spec, loaded, engine)
    launcher = plugins.launcher("local")
    rows = list(range(len(problem.space)))
    random.Random(options.seed).shuffle(rows)
    for row in rows[: options.first]:
        candidate = problem.space.candidate(row)
        trial = replace(predicted_trial(problem, candidate, Role.SEARCH, RUN), number=row)
        limit = time_limit(problem.platform, trial, ())
        with tempfile.TemporaryDirectory() as folder:
            running = launch(problem.platform, launcher, candidate, folder, limit)
            done = measure(running, problem.platform, trial, folder, None)
        step_s = done.measurement.step_time_s if done.measurement else None
        found["runs"].setdefault(str(candidate), []).append(step_s)
        print(f"{candidate}: {step_s or done.reason}, {done.duration_s:.1f} s", file=sys.stderr, flush=True)
    launcher.close()
    found["scan_s"].append(round(time.monotonic() - began, 1))


def _tune(options: argparse.Namespace, found: dict[str, Any]) -> None:
    data = spec_as_data(options.spec)
    data.setdefault("auto_tuner", {}).setdefault("control", {})["use_experience"] = False
    began = time.monotonic()
    outcome = api.tune(data, run_dir=options.out.with_suffix(""), new=True)
    tune_s = round(time.monotonic() - began, 1)
    trials, best = outcome.plan.trials, outcome.plan.best
    assert best is not None
    runs = {name: [each for each in times if each] for name, times in found["runs"].items()}
    best_s = {name: min(times) for name, times in runs.items() if times}
    order = sorted(best_s, key=best_s.__getitem__)
    apart = [max(times) / min(times) - 1.0 for times in runs.values() if len(times) > 1]
    winner = str(best.candidate)
    found["tune"] = {
        "tune_s": tune_s,
        "share_of_a_scan": round(tune_s / statistics.mean(found["scan_s"]), 3),
        "trials": [(str(each.role), str(each.candidate), each.state.value, each.duration_s) for each in trials],
        "winner": winner,
        "place": order.index(winner) + 1,
        "over_the_best": round(best_s[winner] / best_s[order[0]] - 1.0, 4),
        "slowest_over_fastest": round(best_s[order[-1]] / best_s[order[0]], 2),
        "runs_apart": [round(statistics.median(apart), 3), round(max(apart), 3)] if apart else None,
        "table": {name: runs[name] for name in order},
    }
    print(json.dumps({key: value for key, value in found["tune"].items() if key not in ("trials",)}, indent=1))


if __name__ == "__main__":
    main()
