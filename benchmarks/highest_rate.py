"""Compares the search for the highest load within an SLO with an exhaustive scan on a real server.

    python benchmarks/highest_rate.py SPEC [--rounds 3] [--out OUT.json]

SPEC has `serve.slo` and `request_rate: auto` or `concurrency: auto`; its baseline is served. Each round is one launch
for the search and one for the scan, which measures all loads in steps of 5% from half to 1.5 times the load that the
first search found, without stopping any. Arrivals are the same for both. Times exclude the start of the server. The
output has the highest load of each round, too, because other processes disturb single loads. `drift` is the ratio of
the server's CPU time at the load that a search found, in the scan and in the search. It is 1 on a quiet machine; where
it differs by more than a few percent, the machine had another speed, and the two loads are not comparable.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Problem, Workload
from flagcore.domain.serving import Load, ServeSpec
from flagcore.engines.serving.trial.loads import keeps_limits
from flagcore.spec.convert import parse_spec
from flagcore.spec.plain_data import spec_as_data
from flagcore.tuner.problem import build_problem
from flagcore.tuner.stages.launch import planned_launch

STEP, LOWEST, HIGHEST = 1.05, 0.5, 1.5


def main() -> None:
    """Run all rounds and print their result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = parse_spec(
        spec_as_data(options.spec), file=str(options.spec), base=options.spec.parent, engines=plugins.engines()
    )
    serve, workload = spec.serve, plugins.workload(spec.serve.engine)
    if serve.highest is None:
        raise SystemExit("the spec has no `auto` load")
    with loaded_plugins(()) as loaded:
        problem = build_problem(spec, loaded, workload)
    searches, scans, loads = list[dict[str, Any]](), list[dict[str, Any]](), list[Load]()
    for _ in range(options.rounds):
        searches.append(search := run(problem, workload, serve))
        search["highest"] = found(search, serve.slo, serve.highest)
        if not search["highest"]:
            raise SystemExit(f"no load meets the limits: {search}")
        loads = loads or scan_of(serve, search["highest"])
        scans.append(scan := run(problem, workload, replace(serve, loads=tuple(loads), highest=None)))
        scan["highest"] = highest([scan], serve.slo, serve.highest)
        print(json.dumps({"search": search["highest"], "scan": scan["highest"]}), file=sys.stderr, flush=True)
    best, means = highest(scans, serve.slo, serve.highest), {}
    for name, runs in (("search", searches), ("scan", scans)):
        means[name] = statistics.mean(each["seconds"] for each in runs)
    found_loads = [search["highest"] for search in searches]
    summary = {
        "highest_of_scan": best,
        "highest_by_round_of_scan": [scan["highest"] for scan in scans],
        "found": found_loads,
        "errors": [value / best - 1 if best else None for value in found_loads],
        "drift": [drift(search, scan, serve.highest) for search, scan in zip(searches, scans, strict=True)],
        "seconds": means,
        "time_share": means["search"] / means["scan"],
        "others_cores": statistics.mean(point["others_cores"] for scan in scans for point in scan["points"]),
    }
    print(json.dumps(summary, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps({**summary, "searches": searches, "scans": scans}), encoding="utf-8")


def scan_of(serve: ServeSpec, found: float) -> list[Load]:
    """Return the loads of the scan."""
    assert serve.highest is not None
    steps = math.ceil(math.log(HIGHEST / LOWEST) / math.log(STEP))
    values = [found * LOWEST * STEP**step for step in range(steps + 1)]
    if serve.highest == "concurrency":
        values = [float(value) for value in sorted({max(1, round(value)) for value in values})]
    return [serve.loads[0].at(serve.highest, value) for value in values]


def run(problem: Problem, workload: Workload, serve: ServeSpec) -> dict[str, Any]:
    """Serve the baseline, and return the measured points and the seconds of all loads."""
    task = problem.platform.task
    platform = replace(problem.platform, task=replace(task, spec=replace(task.spec, work=replace(serve, repeats=1))))
    with tempfile.TemporaryDirectory() as folder:
        planned = platform.prepared(planned_launch(platform, problem.baseline, folder))
        began = time.monotonic()
        with Path(folder, "output.log").open("wb") as log:
            code = subprocess.run(planned.argv, stdout=log, stderr=log, check=False).returncode
        seconds = time.monotonic() - began
        if code:
            raise SystemExit(Path(folder, "output.log").read_text("utf-8", "replace")[-2000:])
        metrics = json.loads(Path(folder, "metrics.json").read_text("utf-8"))
    points = [{"load": point["load"], **point["repeats"][0]["figures"]} for point in metrics["points"]]
    return {"points": points, "seconds": seconds - max(metrics["startup_s"])}


def found(run: Mapping[str, Any], limits: Mapping[str, float], key: str) -> float | None:
    """Return the highest load of a search within the limits."""
    return max((point["load"][key] for point in run["points"] if keeps_limits([point], limits)), default=None)


def drift(search: Mapping[str, Any], scan: Mapping[str, Any], key: str) -> float:
    """Return the ratio of the server's CPU seconds in the scan, at the nearest load, to those of the load found."""
    cpu_s = []
    for each in (search, scan):
        point = min(each["points"], key=lambda point: abs(math.log(point["load"][key] / search["highest"])))
        cpu_s.append(point["engine_cpu_s"])
    return float(cpu_s[1] / cpu_s[0])


def highest(runs: Sequence[Mapping[str, Any]], limits: Mapping[str, float], key: str) -> float | None:
    """Return the highest load of scans within the limits, interpolated between two loads.

    A figure of a load is its median over all runs. Loads are split so that the fewest are on the wrong side.
    """
    values = sorted({point["load"][key] for each in runs for point in each["points"]})
    excess = [_excess([p for each in runs for p in each["points"] if p["load"][key] == v], limits) for v in values]
    errors = [sum((e > 0) == (i < split) for i, e in enumerate(excess)) for split in range(len(values) + 1)]
    split = errors.index(min(errors))
    if split in (0, len(values)) or excess[split - 1] >= excess[split]:
        return values[split - 1] if split else None
    share = min(max(-excess[split - 1] / (excess[split] - excess[split - 1]), 0.0), 1.0)
    return values[split - 1] * (values[split] / values[split - 1]) ** share


def _excess(points: Sequence[Mapping[str, float]], limits: Mapping[str, float]) -> float:
    """Return the logarithm of the largest ratio of a figure to its limit."""
    return max(math.log(statistics.median(each[name] for each in points) / limit) for name, limit in limits.items())


if __name__ == "__main__":
    main()
