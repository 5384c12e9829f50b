"""Tune a spec in a run directory, and start what won."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.common.inputs import SpecLike, given
from flagcore.api.common.run_folder import RUNS, anywhere, task_of, with_fidelity
from flagcore.api.common.transfer import past as past_of
from flagcore.api.common.warnings import loaded_plugins, parsed, tell, tell_of_problem
from flagcore.api.reporting.report import keep_report, keep_report_of_engines
from flagcore.api.tuning.export import Outcome, keep
from flagcore.api.tuning.several_engines import each_engine
from flagcore.calibration import Experience
from flagcore.contracts import Event, OnEvent, TrialStore, Workload, require_prober
from flagcore.domain.experience import Past
from flagcore.domain.plan import Plan
from flagcore.domain.secrets import redact_data, redact_text, secrets_in_data
from flagcore.domain.spec import Control, Spec
from flagcore.domain.trial import FIDELITIES, PROBE, RUN
from flagcore.errors import EveryTrialFailed, Interrupted, NothingFits, RunError
from flagcore.loop import Dependencies, TuneResult
from flagcore.loop import tune as run_loop
from flagcore.problem import Problem
from flagcore.report.formats import as_yaml
from flagcore.report.serving_text import impossible
from flagcore.report.text import drift_text
from flagcore.spec.serving import engines_of, only
from flagcore.store import OptunaStore, RunDirectory
from flagcore.store.directory import write

PROBER = "learned"
"""The strategy that says what is probed before the first run."""


def tune(
    spec: SpecLike,
    *,
    run_dir: Path | str | None = None,
    new: bool = False,
    without: Collection[str] = (),
    storage: str | None = None,
    fidelity: str | None = None,
    on_event: OnEvent | None = None,
    data: Mapping[str, Any] | None = None,
) -> Outcome:
    """Tune a spec, a file or its data, and keep everything in `run_dir` (default: `runs/` and the file's name).

    An existing run goes on where it was; `new` moves it aside first. `without` names plugins to leave out,
    `storage` any optuna storage to use instead of the run's own journal. `fidelity` (`estimate`, `probe` or `run`) goes
    before the spec's; a run may go on at a higher one. `on_event` is told when a trial starts and ends. `data` is what
    the file says if it is no spec itself but was imported. Raises the errors of `flagcore.errors`; the result is
    written all the same once a trial has run. A spec with several engines tunes one after the other, and the outcome is
    that of the best.
    """
    file, data = given(spec, data)
    directory, engines = Path(run_dir) if run_dir else RUNS / file.stem, engines_of(data)

    def one(some: Mapping[str, Any], where: Path) -> Outcome:
        return _tune(some, file, where, new=new, without=without, storage=storage, fidelity=fidelity, on_event=on_event)

    if len(engines) < 2:
        return one(data, directory)
    for engine in engines:
        parsed(only(data, engine), file=str(file), base=file.parent, without=without)
    outcome: Outcome = each_engine(anywhere(data, file.parent), engines, directory, one)
    return replace(outcome, reported=keep_report_of_engines(directory))


def _tune(
    data: Mapping[str, Any],
    file: Path,
    run_dir: Path,
    *,
    new: bool,
    without: Collection[str],
    storage: str | None,
    fidelity: str | None,
    on_event: OnEvent | None,
) -> Outcome:
    """Tune with one engine."""
    spec = parsed(data, file=str(file), base=file.parent, without=without)
    if fidelity is not None:
        spec = replace(spec, control=replace(spec.control, fidelity=fidelity))
        data = with_fidelity(data, fidelity)
    workload = plugins.workload_of(spec.work)
    launcher, strategy = plugins.launcher(spec.launcher), plugins.strategy(spec.strategy)
    _ready(workload, spec)
    directory = RunDirectory(run_dir)

    name, experience = "", Experience.of_user()

    def past(problem: Problem) -> Past:
        if not spec.control.use_experience:
            return Past.nothing()
        chip = problem.platform.task.cluster.groups[0].chip
        known = experience.records(chip, spec.work.engine, but=name)
        return past_of(known, chip, loaded, workload, spec.objective, problem.platform.knobs)

    def open_store(problem: Problem) -> TrialStore:
        directory.open(new=new)
        tell_of_problem(problem, workload)
        fixed = {"baseline": problem.baseline.as_dict(), "storage": storage}
        nonlocal name
        name = directory.claim(task_of(data, problem), fixed)
        store = OptunaStore(directory.path, problem.space.choices, run=name, objective=spec.objective, url=storage)
        _not_a_step_down(store, spec.control, directory.path)
        if kept := len(store.trials()):
            many = f"{kept} trial{'s' if kept > 1 else ''}"
            tell([f"{directory.path} goes on with the {many} that it has; --new starts afresh"])
        text = as_yaml(anywhere(data, file.parent)) + "\n"
        write(directory.path / "spec.yaml", text, private=bool(secrets_in_data(data)))
        return store

    with loaded_plugins(without) as loaded:
        known = None if new else directory.known()
        if known and known["fixed"].get("storage") != storage:
            kept = redact_text(known["fixed"].get("storage") or "its own journal")
            raise RunError(f"{directory.path} keeps its trials in {kept}: give the same --storage, or --new")
        baseline = (
            known["fixed"].get("baseline")
            if known and known["task"].get("spec") == redact_data(with_fidelity(data))
            else spec.baseline
        )
        try:
            parts = Dependencies(
                plugins=loaded,
                workload=workload,
                launcher=launcher,
                strategy=strategy,
                open_store=open_store,
                on_event=on_event or _unseen,
                past=past,
                probe_strategy=plugins.strategy(PROBER),
            )
            ending = run_loop(replace(spec, baseline=baseline), parts)
            tell(filter(None, [drift_text(ending.plan)]))
            outcome = keep(ending, workload, directory.path, with_fidelity(anywhere(data, file.parent)))
            _remember(experience, name, ending)
            outcome = replace(outcome, reported=keep_report(directory.path, ending, workload, outcome.data))
        finally:
            directory.close()
    if isinstance(ending.error, Interrupted):
        raise Interrupted(f"interrupted; what was measured is kept in {directory.path}")
    if ending.error:
        raise ending.error
    if ending.plan.best is None and ending.plan.fastest is not None:
        raise NothingFits(impossible(ending.plan))
    if ending.plan.best is None:
        raise EveryTrialFailed(_failures(ending.plan, directory.path))
    return outcome


def _ready(workload: Workload, spec: Spec) -> None:
    """Raise SpecError or NoDevice unless what `spec` wants done can be done here; an estimate always can."""
    if spec.control.fidelity == RUN:
        workload.ready(spec)
    if spec.control.fidelity == PROBE or (spec.control.fidelity == RUN and spec.control.probes):
        require_prober(workload).ready_to_probe(spec)


def _not_a_step_down(store: TrialStore, control: Control, run_dir: Path) -> None:
    """Raise RunError if the folder has trials of a higher fidelity than is wanted: its result would be overwritten."""
    kept = max((FIDELITIES.index(trial.fidelity) for trial in store.trials() if not trial.source), default=0)
    if kept > FIDELITIES.index(control.fidelity):
        told = f"has trials of fidelity {FIDELITIES[kept]}, and {control.fidelity} is less"
        raise RunError(f"{run_dir} {told}: give another --run-dir, or --new")


def _remember(experience: Experience, run: str, ending: TuneResult) -> None:
    """Keep what was measured for the runs to come. A run is none the worse if that fails."""
    try:
        experience.save(run, ending.problem.platform.task, ending.plan.trials)
    except RunError as error:
        tell([f"later runs will not learn from this one: {error}"])


def _failures(plan: Plan, run_dir: Path) -> str:
    last = plan.trials[-1] if plan.trials else None
    why = f"; the last one: {last.state.value}: {last.reason} (logs in {(run_dir / last.log).parent})" if last else ""
    return f"none of {len(plan.trials)} trials gave a measurement{why}"


def _unseen(event: Event) -> None:
    """Drop an event."""
