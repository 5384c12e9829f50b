"""Tune a spec in a run directory, and start what won."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from flagcore import plugins
from flagcore.api.experienced import past as past_of
from flagcore.api.telling import loaded_plugins, tell, tell_of_problem
from flagcore.calibration import Experience
from flagcore.contracts import Event, OnEvent, TrialStore, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.experience import Past
from flagcore.domain.launch import Launch
from flagcore.domain.plan import Plan
from flagcore.domain.spec import Control, Spec
from flagcore.domain.trial import ESTIMATE, FIDELITIES, PROBE, RUN
from flagcore.errors import EveryTrialFailed, Interrupted, NoDevice, RunError, SpecError, UsageError
from flagcore.loop import Ending, Parts
from flagcore.loop import tune as run_loop
from flagcore.problem import Problem
from flagcore.report.formats import as_yaml
from flagcore.report.result import result
from flagcore.report.text import candidate_text, drift_text, plan_text
from flagcore.spec import parse_spec, spec_as_data
from flagcore.stages.launch import prepared
from flagcore.store import OptunaStore, RunDirectory
from flagcore.store.directory import writable, write

RUNS = Path("runs")
PROBER = "learned"
"""The strategy that says what is probed before the first run."""
MEETING_PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Where the ranks of a best configuration meet if nobody says; each trial gets a free port from its launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a tune found: the plan, the folder that holds it, and the same as plain data and as text.

    `run_best` says that the spec asks to start the winner at the end, `can_start` that the winner can be started as it
    stands.
    """

    plan: Plan
    run_dir: Path
    data: Mapping[str, Any]
    run_best: bool
    can_start: bool = True

    def __str__(self) -> str:
        return plan_text(self.plan)


def tune(
    spec_file: Path | str,
    *,
    run_dir: Path | str | None = None,
    new: bool = False,
    without: Collection[str] = (),
    storage: str | None = None,
    fidelity: str | None = None,
    on_event: OnEvent | None = None,
) -> Outcome:
    """Tune `spec_file` and keep everything in `run_dir` (default: `runs/` and the file's name).

    An existing run goes on where it was; `new` moves it aside first. `without` names plugins to leave out,
    `storage` any optuna storage to use instead of the run's own journal. `fidelity` (`estimate`, `probe` or `run`) goes
    before the spec's; a run may go on at a higher one. Raises the errors of
    `flagcore.errors`; the result is written all the same once a trial has run.
    """
    file = Path(spec_file)
    data = spec_as_data(file)
    spec = parse_spec(data, file=str(file), base=file.parent)
    if fidelity is not None:
        spec = replace(spec, control=replace(spec.control, fidelity=fidelity))
        data = _with_fidelity(data, fidelity)
    workload = plugins.workload(spec.train.engine)
    launcher, strategy = plugins.launcher(spec.launcher), plugins.strategy(spec.strategy)
    _ready(workload, spec)
    directory = RunDirectory(Path(run_dir) if run_dir else RUNS / file.stem)

    name, experience = "", Experience.of_user()

    def past(problem: Problem) -> Past:
        if not spec.control.use_experience:
            return Past.nothing()
        chip = problem.platform.task.cluster.groups[0].chip
        return past_of(experience.records(chip, spec.train.engine, but=name), chip, loaded, workload)

    def open_store(problem: Problem) -> TrialStore:
        directory.open(new=new)
        tell_of_problem(problem, workload)
        fixed = {"baseline": problem.baseline.as_dict(), "storage": storage}
        nonlocal name
        name = directory.claim(_task(data, problem), fixed)
        store = OptunaStore(directory.path, problem.space.choices, run=name, objective=spec.objective, url=storage)
        _not_a_step_down(store, spec.control, directory.path)
        write(directory.path / "spec.yaml", as_yaml(_anywhere(data, file.parent)) + "\n")
        return store

    with loaded_plugins(without) as loaded:
        known = None if new else directory.known()
        if known and known["fixed"].get("storage") != storage:
            kept = known["fixed"].get("storage") or "its own journal"
            raise RunError(f"{directory.path} keeps its trials in {kept}: give the same --storage, or --new")
        baseline = (
            known["fixed"].get("baseline")
            if known and known["task"].get("spec") == _with_fidelity(data)
            else spec.baseline
        )
        try:
            parts = Parts(
                plugins=loaded,
                workload=workload,
                launcher=launcher,
                strategy=strategy,
                open_store=open_store,
                on_event=on_event or _unseen,
                past=past,
                prober=plugins.strategy(PROBER),
            )
            ending = run_loop(replace(spec, baseline=baseline), parts)
            tell(filter(None, [drift_text(ending.plan)]))
            outcome = _keep(ending, workload, directory.path, _anywhere(data, file.parent))
            _remember(experience, name, ending)
        finally:
            directory.close()
    if isinstance(ending.error, Interrupted):
        raise Interrupted(f"interrupted; what was measured is kept in {directory.path}")
    if ending.error:
        raise ending.error
    if ending.plan.best is None:
        raise EveryTrialFailed(_failures(ending.plan, directory.path))
    return outcome


def _ready(workload: Workload, spec: Spec) -> None:
    """Raise SpecError or NoDevice unless what `spec` wants done can be done here; an estimate always can."""
    if spec.control.fidelity == RUN:
        workload.ready(spec)
    if spec.control.fidelity == PROBE or (spec.control.fidelity == RUN and spec.control.probes):
        workload.ready(spec, probe=True)


def _not_a_step_down(store: TrialStore, control: Control, run_dir: Path) -> None:
    """Raise RunError if the folder has trials of a higher fidelity than is wanted: its result would be overwritten."""
    kept = max((FIDELITIES.index(trial.fidelity) for trial in store.trials()), default=0)
    if kept > FIDELITIES.index(control.fidelity):
        told = f"has trials of fidelity {FIDELITIES[kept]}, and {control.fidelity} is less"
        raise RunError(f"{run_dir} {told}: give another --run-dir, or --new")


def _with_fidelity(data: Mapping[str, Any], fidelity: str | None = None) -> dict[str, Any]:
    """Return a spec's data with a fidelity, or without any."""
    tuner = dict(data.get("auto_tuner") or {})
    control = {key: value for key, value in (tuner.get("control") or {}).items() if key != "fidelity"}
    if fidelity is not None:
        control["fidelity"] = fidelity
    if control == (tuner.get("control") or {}):
        return dict(data)
    return {**data, "auto_tuner": {**tuner, "control": control}}


def run_best(run_dir: Path | str, *, stdout: int | None = None) -> NoReturn:
    """Become the best configuration of a run, for real: this process is replaced by it.

    `stdout` is a file descriptor for its output. Raises RunError if the run has no best configuration,
    UsageError if it cannot be started.
    """
    file = Path(run_dir) / "best" / "launch.json"
    try:
        launch = json.loads(file.read_text(encoding="utf-8"))
        argv, environment, folder = list(launch["argv"]), dict(launch["environment"]), str(launch["directory"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({type(error).__name__})"
        raise RunError(f"{file} {reason}; `flag tune` writes it when it has measured a best configuration") from None
    sys.stdout.flush()
    if stdout is not None:
        os.dup2(stdout, 1)
    try:
        os.chdir(folder)
        os.execvpe(argv[0], argv, {**MEETING_PLACE, **os.environ, **environment})
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{' '.join(map(str, argv[:1]))} cannot be started in {folder}: {error}") from None


def _keep(ending: Ending, workload: Workload, run_dir: Path, spec: Mapping[str, Any]) -> Outcome:
    """Write the result and, where there is one, the best configuration in every form in which it can be used."""
    plan, problem = ending.plan, ending.problem
    cannot = _cannot_start(problem, workload) if plan.best else "there is no best"
    data = result(plan, str(run_dir))
    with writable(run_dir):
        write(run_dir / "result.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        write(run_dir / "report.txt", plan_text(plan) + "\n")
        if plan.best:
            folder = run_dir.resolve() / "best"
            folder.mkdir(exist_ok=True)
            if cannot:
                write(run_dir / "best.sh", _excuse(plan, cannot))
            else:
                planned = workload.launch(problem.platform, plan.best.candidate, str(folder), for_real=True)
                launch = prepared(problem.platform, planned)
                write(folder / "launch.json", json.dumps({**asdict(launch), "directory": _directory(launch)}, indent=1))
                write(run_dir / "best.sh", _script(plan, launch))
            (run_dir / "best.sh").chmod(0o755)
            write(run_dir / "best.yaml", _best_spec(plan.best.candidate, _with_fidelity(spec)))
    wanted = problem.platform.task.spec.control.run_best and plan.fidelity == RUN
    return Outcome(plan=plan, run_dir=run_dir, data=data, run_best=wanted, can_start=not cannot)


def _cannot_start(problem: Problem, workload: Workload) -> str | None:
    """Return why the best of a plan cannot be started as it stands on any machine, None if it can."""
    platform = problem.platform
    try:
        workload.ready(platform.task.spec)
    except SpecError as error:
        return str(error)
    except NoDevice:
        pass  # the engine is not installed on this machine
    if platform.task.spec.train.command is None and platform.support.device_type is None:
        return f"no installed plugin says how {workload.name} runs on {platform.task.cluster.chips}"
    return None


def _remember(experience: Experience, run: str, ending: Ending) -> None:
    """Keep what was measured for the runs to come. A run is none the worse if that fails."""
    try:
        experience.keep(run, ending.problem.platform.task, ending.plan.trials)
    except RunError as error:
        tell([f"later runs will not learn from this one: {error}"])


def _script(plan: Plan, launch: Launch) -> str:
    """Return a shell script that starts `launch` as it stands."""
    assert plan.best is not None
    exports = [f'export {name}="${{{name}:-{value}}}"' for name, value in MEETING_PLACE.items()]
    exports += [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    lines = [
        "#!/bin/sh",
        _heading(plan),
        f"cd {shlex.quote(_directory(launch))} || exit 1",
        *exports,
        f"exec {shlex.join(launch.argv)}",
    ]
    return "\n".join(lines) + "\n"


def _excuse(plan: Plan, why: str) -> str:
    """Return a shell script that says why it cannot start the best of a plan."""
    told = f"echo {shlex.quote(f'this cannot be started as it stands: {why}')} >&2"
    return "\n".join(["#!/bin/sh", _heading(plan), told, "exit 2"]) + "\n"


def _heading(plan: Plan) -> str:
    assert plan.best is not None
    of = {
        RUN: f"{len(plan.trials)} trials",
        PROBE: f"{len(plan.trials)} candidates probed on one device, none of which ran,",
        ESTIMATE: f"{plan.counts.candidates} candidates as predicted, none of which ran,",
    }[plan.fidelity]
    return f"# Best of {of} on {plan.devices} x {plan.chip}: {candidate_text(plan.best.candidate)}"


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
    train = dict(data.get("train") or {})
    if train.get("command"):
        moved["train"] = {**train, "directory": str((base / (train.get("directory") or ".")).resolve())}
    cluster = data.get("cluster")
    if isinstance(cluster, dict) and cluster.get("hostfile"):
        moved["cluster"] = {**cluster, "hostfile": str((base / cluster["hostfile"]).resolve())}
    return moved


def _task(data: Mapping[str, Any], problem: Problem) -> dict[str, object]:
    """Return what must not change while a run goes on: spec, model, hardware, and how trials are started there."""
    cluster = problem.platform.task.cluster
    group = cluster.groups[0]
    hardware = {"chip": cluster.chips, "nodes": group.nodes, "devices_per_node": group.devices_per_node}
    platform = problem.platform
    engine = {"device": platform.support.device_type, "backend": platform.support.distributed_backend}
    given = {"environment": dict(platform.environment), "engine": engine}
    return {
        "spec": _with_fidelity(data),
        "model": asdict(platform.task.spec.model),
        "hardware": hardware,
        "plugins say": given,
    }


def _failures(plan: Plan, run_dir: Path) -> str:
    last = plan.trials[-1] if plan.trials else None
    why = f"; the last one: {last.state.value}: {last.reason} (logs in {(run_dir / last.log).parent})" if last else ""
    return f"none of {len(plan.trials)} trials gave a measurement{why}"


def _unseen(event: Event) -> None:
    """Drop an event."""
