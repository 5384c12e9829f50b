"""Tune a spec in a run directory, and start what won."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.contracts import Event, OnEvent, TrialStore, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch
from flagcore.domain.plan import Plan
from flagcore.domain.spec import Spec
from flagcore.errors import EveryTrialFailed, Interrupted, NoDevice, RunError, UsageError
from flagcore.loop import INTERRUPTED, Parts
from flagcore.loop import tune as run_loop
from flagcore.problem import Problem
from flagcore.report.formats import as_yaml
from flagcore.report.result import DIRECTIONS, result
from flagcore.report.text import candidate_text, plan_text
from flagcore.spec import parse_spec, spec_as_data
from flagcore.stages.launch import prepared
from flagcore.store import OptunaStore, RunDirectory
from flagcore.store.directory import writable, write

RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a tune found: the plan, the folder that holds it, and the same as plain data and as text.

    `run_best` says that the spec asks to start the winner at the end.
    """

    plan: Plan
    run_dir: Path
    data: Mapping[str, Any]
    run_best: bool

    def __str__(self) -> str:
        return plan_text(self.plan)


def tune(
    spec_file: Path | str,
    *,
    run_dir: Path | str | None = None,
    new: bool = False,
    without: Collection[str] = (),
    storage: str | None = None,
    on_event: OnEvent | None = None,
) -> Outcome:
    """Tune `spec_file` and keep everything in `run_dir` (default: `runs/` and the file's name).

    An existing run goes on where it was; `new` moves it aside first. `without` names plugins to leave out,
    `storage` any optuna storage to use instead of the run's own journal. Raises the errors of
    `flagcore.errors`; on Interrupted and EveryTrialFailed the result is written all the same.
    """
    file = Path(spec_file)
    data = spec_as_data(file)
    spec = parse_spec(data, file=str(file), base=file.parent)
    workload = plugins.workload(spec.train.engine)
    launcher, strategy = plugins.launcher(spec.launcher), plugins.strategy(spec.strategy)
    _needs(workload, spec)
    directory = RunDirectory(Path(run_dir) if run_dir else RUNS / file.stem)

    def open_store(problem: Problem) -> TrialStore:
        directory.open(new=new)
        with writable(directory.path):
            directory.claim(_identity(data, problem))
            write(directory.path / "spec.yaml", as_yaml(_anywhere(data, file.parent)) + "\n")
        return OptunaStore(directory.path, _choices(problem), direction=DIRECTIONS[spec.objective], url=storage)

    loaded = plugins.load_plugins(without)
    parts = Parts(
        plugins=loaded,
        workload=workload,
        launcher=launcher,
        strategy=strategy,
        open_store=open_store,
        on_event=on_event or _silent,
    )
    try:
        plan, problem = run_loop(spec, parts)
        outcome = _keep(plan, problem, workload, directory.path, _anywhere(data, file.parent))
    finally:
        directory.close()
    if plan.stopped_because == INTERRUPTED:
        raise Interrupted(f"interrupted; {len(plan.trials)} trials are kept in {directory.path}")
    if plan.best is None:
        raise EveryTrialFailed(_failures(plan, directory.path))
    return outcome


def run_best(run_dir: Path | str, *, stdout: Any = None) -> int:
    """Start the best configuration of a run for real, in the foreground, and return its exit status.

    Raises RunError if the run has no best configuration.
    """
    file = Path(run_dir) / "best" / "launch.json"
    try:
        launch = json.loads(file.read_text(encoding="utf-8"))
        argv, environment, folder = launch["argv"], launch["environment"], launch["directory"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({type(error).__name__})"
        raise RunError(f"{file} {reason}; `flag tune` writes it when it has measured a best configuration") from None
    try:
        return subprocess.run(argv, env={**os.environ, **environment}, cwd=folder, stdout=stdout).returncode
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror or error}") from None


def _keep(plan: Plan, problem: Problem, workload: Workload, run_dir: Path, spec: Mapping[str, Any]) -> Outcome:
    """Write the result and, where there is one, the best configuration in every form in which it can be used."""
    data = result(plan, str(run_dir))
    with writable(run_dir):
        write(run_dir / "result.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        write(run_dir / "report.txt", plan_text(plan) + "\n")
        if plan.best and plan.best.measurement:
            folder = run_dir.resolve() / "best"
            folder.mkdir(exist_ok=True)
            planned = workload.launch(problem.platform, plan.best.candidate, str(folder), for_real=True)
            launch = prepared(problem.platform, planned)
            write(folder / "launch.json", json.dumps({**asdict(launch), "directory": _directory(launch)}, indent=1))
            write(run_dir / "best.sh", _script(plan, launch))
            (run_dir / "best.sh").chmod(0o755)
            write(run_dir / "best.yaml", _best_spec(plan.best.candidate, spec))
    run_best = problem.platform.task.spec.control.run_best
    return Outcome(plan=plan, run_dir=run_dir, data=data, run_best=run_best)


def _script(plan: Plan, launch: Launch) -> str:
    """Return a shell script that starts `launch` as it stands."""
    assert plan.best is not None
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    lines = [
        "#!/bin/sh",
        f"# Best of {len(plan.trials)} trials on {plan.devices} x {plan.chip}: {candidate_text(plan.best.candidate)}",
        f"cd {shlex.quote(_directory(launch))} || exit 1",
        *exports,
        f"exec {shlex.join(launch.argv)}",
    ]
    return "\n".join(lines) + "\n"


def _directory(launch: Launch) -> str:
    return launch.directory or launch.folder


def _best_spec(candidate: Candidate, spec: Mapping[str, Any]) -> str:
    """Return the user's spec with every knob fixed to the best value."""
    tuner = {key: value for key, value in (spec.get("auto_tuner") or {}).items() if key != "baseline"}
    return as_yaml({**spec, "auto_tuner": {**tuner, "space": candidate.as_dict()}}) + "\n"


def _anywhere(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return a spec's data with absolute paths, so that a copy of it means the same in another folder."""
    moved = dict(data)
    if isinstance(data.get("model"), str):
        moved["model"] = str((base / data["model"]).resolve())
    cluster = data.get("cluster")
    if isinstance(cluster, dict) and cluster.get("hostfile"):
        moved["cluster"] = {**cluster, "hostfile": str((base / cluster["hostfile"]).resolve())}
    return moved


def _identity(data: Mapping[str, Any], problem: Problem) -> dict[str, object]:
    """Return what must not change while a run goes on: the spec, the hardware, and what was asked of the engine."""
    group = problem.platform.task.cluster.groups[0]
    hardware = {"chip": group.chip.name, "nodes": group.nodes, "devices_per_node": group.devices_per_node}
    return {"spec": dict(data), "model": asdict(problem.platform.task.spec.model), "hardware": hardware}


def _choices(problem: Problem) -> dict[str, tuple[Any, ...]]:
    """Return every value that each knob can have in this run, for the store."""
    return {
        axis.knob: tuple(axis.decode(int(code)) for code in sorted(codes.tolist()))
        for axis, codes in zip(problem.space.axes, problem.space.codes, strict=True)
    }


def _needs(workload: Workload, spec: Spec) -> None:
    """Raise NoDevice unless the engine's modules are here; a user's own command brings its own."""
    missing = [pip for module, pip in workload.modules.items() if not _installed(module)]
    if missing and spec.train.command is None:
        raise NoDevice(
            f"the engine {workload.name} needs {', '.join(missing)}, not installed here; "
            f"pip install 'flagcore[{workload.name}]', or use train.command"
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _failures(plan: Plan, run_dir: Path) -> str:
    last = plan.trials[-1] if plan.trials else None
    why = f"; the last one: {last.state.value}: {last.reason} ({run_dir / last.log})" if last else ""
    return f"none of {len(plan.trials)} trials gave a measurement{why}"


def _silent(event: Event) -> None:
    """Drop an event."""
