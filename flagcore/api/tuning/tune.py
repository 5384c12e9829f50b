"""Tune a spec in a run directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.common.inputs import (
    RUNS,
    SpecLike,
    fixed_task,
    spec_data,
    with_absolute_paths,
    with_fidelity,
    write_spec,
)
from flagcore.api.common.transfer import past_of_problem
from flagcore.api.common.warnings import loaded_plugins, parsed, warn, warn_about_problem
from flagcore.api.reporting.report import save_report, save_report_of_engines
from flagcore.api.tuning.export import Outcome, save
from flagcore.api.tuning.several_engines import each_engine
from flagcore.calibration import Experience
from flagcore.contracts import OnEvent, TrialStore, Workload, require_prober
from flagcore.domain.candidate import KnobValue
from flagcore.domain.secrets import redact_data, redact_text
from flagcore.domain.spec import Control, Spec
from flagcore.domain.trial import FIDELITIES, PROBE, RUN
from flagcore.errors import EveryTrialFailed, Interrupted, NothingFits, RunError
from flagcore.loop import Dependencies, TuneResult
from flagcore.loop import tune as run_loop
from flagcore.plugins import LoadedPlugins
from flagcore.problem import Problem
from flagcore.report.page.run import RunData
from flagcore.report.page.summary import no_best
from flagcore.report.text import drift_text
from flagcore.spec.serving import engines_of, only
from flagcore.store import OptunaStore, RunDirectory

PROBE_STRATEGY = "learned"
"""The strategy that chooses what is probed before the first run."""


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
    """Tune a spec, a file or its data, and save everything in `run_dir` (default: `runs/` and the file's name).

    An existing run is resumed; `new` moves it aside first. `without` names plugins to leave out, `storage` any optuna
    storage to use instead of the run's own journal. `fidelity` (`estimate`, `probe` or `run`) overrides the spec's; a
    run may be resumed at a higher one. `on_event` is called when a trial starts and ends. `data` is the content of the
    file if that was imported. A spec with several engines tunes one after the other, and the outcome is that of the
    best. Raises the errors of `flagcore.errors`; the result is written if a trial has run.
    """
    file, data = spec_data(spec, data)
    directory, engines = Path(run_dir) if run_dir else RUNS / file.stem, engines_of(data)

    def tune_one(some: Mapping[str, Any], folder: Path) -> Outcome:
        run = _EngineRun(some, file, folder, new, without, storage, fidelity)
        return run.tune(on_event or (lambda event: None))

    if len(engines) < 2:
        return tune_one(data, directory)
    for engine in engines:
        parsed(only(data, engine), file=str(file), base=file.parent, without=without)
    outcome: Outcome = each_engine(with_absolute_paths(data, file.parent), engines, directory, tune_one)
    return replace(outcome, reported=save_report_of_engines(directory))


class _EngineRun:
    """Tunes one engine in one folder."""

    def __init__(
        self,
        data: Mapping[str, Any],
        file: Path,
        run_dir: Path,
        new: bool,
        without: Collection[str],
        storage: str | None,
        fidelity: str | None,
    ) -> None:
        spec = parsed(data, file=str(file), base=file.parent, without=without)
        if fidelity is not None:
            spec = replace(spec, control=replace(spec.control, fidelity=fidelity))
            data = with_fidelity(data, fidelity)
        self.spec, self.data, self.base = spec, data, file.parent
        self.new, self.without, self.storage = new, without, storage
        self.workload = plugins.workload_of(spec.work)
        self.launcher, self.strategy = plugins.launcher(spec.launcher), plugins.strategy(spec.strategy)
        self.directory, self.experience, self.name = RunDirectory(run_dir), Experience.of_user(), ""

    def tune(self, on_event: OnEvent) -> Outcome:
        """Tune, save and report. Raises what stopped the run, or that nothing was measured."""
        _require_ready(self.workload, self.spec)
        with loaded_plugins(self.without) as loaded:
            spec = replace(self.spec, baseline=self._baseline())
            try:
                result = run_loop(spec, self._dependencies(loaded, on_event))
                outcome = self._save(result)
            finally:
                self.directory.close()
        _raise_failure(result, outcome)
        return outcome

    def _baseline(self) -> Mapping[str, KnobValue] | None:
        """Return the baseline of the run that is resumed, or the spec's. Raises RunError for another storage."""
        known = None if self.new else self.directory.known()
        if known is None:
            return self.spec.baseline
        fixed = known["fixed"]
        if fixed.get("storage") != self.storage:
            where = redact_text(fixed.get("storage") or "its own journal")
            raise RunError(f"{self.directory.path} has its trials in {where}: use the same --storage, or --new")
        same_spec = known["task"].get("spec") == redact_data(with_fidelity(self.data))
        baseline: Mapping[str, KnobValue] | None = fixed.get("baseline")
        return baseline if same_spec else self.spec.baseline

    def _dependencies(self, loaded: LoadedPlugins, on_event: OnEvent) -> Dependencies:
        return Dependencies(
            plugins=loaded,
            workload=self.workload,
            launcher=self.launcher,
            strategy=self.strategy,
            open_store=self._open_store,
            on_event=on_event,
            past=lambda problem: past_of_problem(problem, loaded, self.workload, self.name),
            probe_strategy=plugins.strategy(PROBE_STRATEGY),
        )

    def _open_store(self, problem: Problem) -> TrialStore:
        directory, storage = self.directory, self.storage
        directory.open(new=self.new)
        warn_about_problem(problem, self.workload)
        fixed = {"baseline": problem.baseline.as_dict(), "storage": storage}
        self.name = directory.claim(fixed_task(self.data, problem), fixed)
        choices, objective = problem.space.choices, self.spec.objective
        store = OptunaStore(directory.path, choices, run=self.name, objective=objective, url=storage)
        _require_no_higher_fidelity(store, self.spec.control, directory.path)
        if done := len(store.trials()):
            warn([f"resuming {directory.path}: {done} trial{'s' if done > 1 else ''} done; --new starts over"])
        write_spec(directory.path, self.data, self.base)
        return store

    def _save(self, result: TuneResult) -> Outcome:
        folder = self.directory.path
        outcome = save(result, self.workload, folder, with_fidelity(with_absolute_paths(self.data, self.base)))
        warn(filter(None, [drift_text(outcome.data["noise"])]))
        try:
            self.experience.save(self.name, result.problem.platform.task, result.plan.trials)
        except RunError as error:
            warn([f"later runs will not learn from this one: {error}"])
        return replace(outcome, reported=save_report(folder, result, self.workload, outcome.data))


def _require_ready(workload: Workload, spec: Spec) -> None:
    """Raise SpecError or NoDevice unless trials at the fidelity of `spec` can run here; an estimate always can."""
    if spec.control.fidelity == RUN:
        workload.ready(spec)
    if spec.control.fidelity == PROBE or (spec.control.fidelity == RUN and spec.control.probes):
        require_prober(workload).ready_to_probe(spec)


def _require_no_higher_fidelity(store: TrialStore, control: Control, run_dir: Path) -> None:
    """Raise RunError if the folder has trials of a higher fidelity: their result would be overwritten."""
    highest = max((FIDELITIES.index(trial.fidelity) for trial in store.trials() if not trial.source), default=0)
    if highest > FIDELITIES.index(control.fidelity):
        problem = f"has trials of fidelity {FIDELITIES[highest]}, which is higher than {control.fidelity}"
        raise RunError(f"{run_dir} {problem}: use another --run-dir, or --new")


def _raise_failure(result: TuneResult, outcome: Outcome) -> None:
    plan, run_dir = outcome.plan, outcome.run_dir
    if isinstance(result.error, Interrupted):
        raise Interrupted(f"interrupted; finished trials are in {run_dir}")
    if result.error:
        raise result.error
    if plan.best is None and plan.fastest is not None:
        raise NothingFits(no_best(RunData(result=outcome.data, folder=run_dir, knobs=plan.knobs)))
    if plan.best is None:
        last = plan.trials[-1] if plan.trials else None
        logs = f" (logs in {(run_dir / last.log).parent})" if last else ""
        why = f"; the last one: {last.state.value}: {last.reason}{logs}" if last else ""
        raise EveryTrialFailed(f"none of {len(plan.trials)} trials gave a measurement{why}")
