"""Compares FlagScale's auto-tuner with flagcore's on one tree and machine: trials, seconds, and speedup.

    python -m benchmarks.flagscale_side_by_side VENV DIR NAME --work FOLDER [--repeats 3] [OVERRIDES...]

VENV is a virtual environment with FlagScale and torch; DIR and NAME are a tree. The tree's own job and both choices are
run again in turn, `--repeats` times each; a value is the median of the steps after the first. FlagScale runs in its own
PID namespace, because its scripts kill processes by name.
"""

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_flagscale import FlagScale

from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import Spec
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.launchers.local import free_port
from flagcore.plugins import engines, load_plugins
from flagcore.spec.convert import parse_spec
from flagcore.tuner.stages.complete import complete_by_plugins

STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def flagscale(environment: Path, directory: Path, name: str, overrides: Sequence[str], work: Path) -> dict[str, Any]:
    """Run FlagScale's tuner. Return its seconds, the number of trials, and the values of the best one."""
    (root,) = environment.glob("lib/python3*/site-packages/flag_scale")
    command = [str(environment / "bin" / "python"), str(root / "run.py"), "--config-path", str(directory.resolve())]
    command += ["--config-name", name, *overrides, f"experiment.exp_dir={work}", "action=auto_tune"]
    start = time.monotonic()
    subprocess.run([*NAMESPACE, *command], env=variables(environment, root), stdout=subprocess.DEVNULL, check=True)
    seconds = time.monotonic() - start
    with (work / "auto_tuner" / "history.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    measured = [row for row in rows if row["performance"] not in ("", "None")]
    best = min(measured, key=lambda row: float(row["performance"]))
    values = {knob.name: _value(best[knob.name]) for knob in WORKLOAD.knobs if knob.name in best}
    return {"seconds": seconds, "trials": len(rows), "measured": len(measured), "best": values}


def variables(environment: Path, root: Path) -> dict[str, str]:
    """Return FlagScale's environment, with the virtual environment's programs first in PATH."""
    paths = [str(root), str(root / "third_party" / "Megatron-LM"), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": ":".join(paths), "PYTHONWARNINGS": "ignore"}


def _value(text: str) -> KnobValue:
    known: dict[str, KnobValue] = {"True": True, "False": False, "None": None, "": None}
    return known[text] if text in known else int(float(text)) if re.fullmatch(r"[\d.]+", text) else text


def flagcore(spec: Spec, data: Mapping[str, Any], work: Path, environment: Path) -> dict[str, Any]:
    """Run flagcore's tuner. Return its seconds, the number of trials, and the values of the baseline and the best."""
    file = work / "spec.yaml"
    file.write_text(json.dumps(data), encoding="utf-8")
    code = "from flagcore.cli import main; main()"
    command = [sys.executable, "-c", code, "tune", str(file), "--run-dir", str(work / "run")]
    start = time.monotonic()
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    subprocess.run(command, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL, check=True)
    seconds = time.monotonic() - start
    result = json.loads((work / "run" / "result.json").read_text(encoding="utf-8"))
    trials = result["trials"]
    best = next(each["candidate"] for each in trials if each["number"] == result["best"]["number"])
    base = next(each["candidate"] for each in trials if each["role"] == "baseline")
    measured = sum(each["state"] == "measured" for each in trials)
    return {"seconds": seconds, "trials": len(trials), "measured": measured, "best": best, "baseline": base}


def step_ms(spec: Spec, values: Mapping[str, KnobValue], folder: Path, environment: Path) -> float:
    """Run a candidate once and return the median of its steps after the first, in milliseconds."""
    folder.mkdir(parents=True)
    platform = complete_by_plugins(spec, load_plugins(), WORKLOAD)
    launch = WORKLOAD.launch(platform, Candidate.of(values), str(folder))
    argv = [word.replace("{master_port}", str(free_port())) for word in launch.argv]
    variables = {
        name: str(value) for name, value in {**platform.environment, **spec.envs, **launch.environment}.items()
    }
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    process = subprocess.run(
        argv,
        cwd=launch.directory,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return statistics.median([float(each) for each in STEP.findall(process.stdout)][1:])


def main() -> None:
    """Print a table of both tuners."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = options.environment.resolve()
    os.environ["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
    found = FlagScale().read_tree(options.directory, options.name, options.overrides)
    found.data["cluster"]["chip"] = os.environ.get("CHIP", "auto")
    spec = parse_spec(found.data, file=found.file, base=Path(), engines=engines())
    flagcore_result = flagcore(spec, found.data, work, environment)
    flagscale_result = flagscale(environment, options.directory, options.name, options.overrides, work / "flagscale")
    jobs = {
        "the tree's own": flagcore_result["baseline"],
        "FlagScale": flagscale_result["best"],
        "flagcore": flagcore_result["best"],
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(options.repeats):
        for name, values in jobs.items():
            folder = work / "again" / "trials" / f"{repeat}-{name.replace(' ', '-')}"
            times[name].append(step_ms(spec, values, folder, environment))
    base = statistics.median(times["the tree's own"])
    for name, tuner in (("FlagScale", flagscale_result), ("flagcore", flagcore_result)):
        step = statistics.median(times[name])
        print(
            f"{name:10} {tuner['trials']:3d} trials {tuner['seconds']:6.0f} s  {step:8.1f} ms, gain {base / step:.2f}x"
        )
        print(f"           {tuner['best']}")


if __name__ == "__main__":
    main()
