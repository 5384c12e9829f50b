"""Tunes a spec in a run directory, with one engine or with several."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagcore import plugins
from flagcore.api import inputs
from flagcore.api.commands.doctor import host_check
from flagcore.api.commands.estimate import estimate
from flagcore.api.commands.report import save_report, save_report_of_engines
from flagcore.api.commands.watching import Watchers
from flagcore.api.jobs import past_of_problem
from flagcore.api.notes import warn, warn_about_problem
from flagcore.api.outcome import Outcome, save
from flagcore.api.runs import RESULT, read_result, saved_trials, with_known_values
from flagcore.contracts import Event, OnEvent, Problem, Telemetry, probes_of
from flagcore.domain.chip import Device
from flagcore.domain.files import writable, write
from flagcore.domain.plan import Plan
from flagcore.domain.secrets import redact_data, redact_text
from flagcore.domain.space import KnobValue
from flagcore.domain.trial import ESTIMATE, FIDELITIES, PROBE, RUN, TrialState
from flagcore.domain.units import SECONDS, parse_amount
from flagcore.errors import EveryTrialFailed, FlagError, HostLost, Interrupted, NothingFits, RunError, UsageError
from flagcore.i18n import N_, _, ngettext
from flagcore.report.estimate import Estimate
from flagcore.report.result import notes_of
from flagcore.report.summary import no_best
from flagcore.report.text import noise_warnings
from flagcore.spec.convert import engines_of, select_engine
from flagcore.tuner.experience import Experience
from flagcore.tuner.feasibility import crowded_baseline_text
from flagcore.tuner.loop import Dependencies, TuneResult
from flagcore.tuner.loop import tune as run_loop
from flagcore.tuner.planner import STOPPED
from flagcore.tuner.run_folder import RunDirectory

if TYPE_CHECKING:
    from flagcore.tuner.store import OptunaStore  # importing optuna is slow

PROBE_STRATEGY = "learned"
"""The name of the strategy that chooses the probes before the first run."""


def tune(
    spec: inputs.SpecLike,
    *,
    run_dir: Path | str | None = None,
    new: bool = False,
    without: Collection[str] = (),
    storage: str | None = None,
    fidelity: str | None = None,
    objective: str | None = None,
    on_event: OnEvent | None = None,
    watch: Collection[str] = (),
) -> Outcome:
    """Tune a spec (a file or its data) and save all files in `run_dir`.

    `run_dir`: by default, `runs/` and the name of the file. An existing run is resumed; with `new`, it is moved aside.
    `without`: names of plugins to disable. `storage`: an Optuna storage that replaces the journal. `fidelity`
    (`estimate`, `probe` or `run`) and `objective` override the spec; a run may be resumed at a higher fidelity.
    `on_event`: called when a trial starts and when it ends; its argument's `stop()` ends the search. `watch`: names of
    watchers, such as `webhook`, which get events and cannot delay or stop the run. Several engines are tuned one after
    the other, and the outcome of the best engine is returned. Raises the errors of `flagcore.errors`. The result is
    written if a trial has run.
    """
    file, data = inputs.spec_data(
        spec if objective is None else inputs.changed_spec(spec, {"auto_tuner.objective": objective})
    )
    data = data if fidelity is None else inputs.with_fidelity(data, fidelity)
    directory, engines = Path(run_dir) if run_dir else inputs.RUNS / file.stem, engines_of(data, plugins.kinds())

    def tune_one(content: Mapping[str, Any], folder: Path) -> Outcome:
        return _EngineRun(content, file, folder, new, without, storage, watch).tune(on_event or (lambda event: None))

    if len(engines) < 2:
        return tune_one(data, directory)
    inputs.check_spec(inputs.LoadedSpec(file, data), without)
    outcome = each_engine(inputs.with_absolute_paths(data, file.parent), engines, directory, tune_one)
    return replace(outcome, reported=save_report_of_engines(directory))


def dry_run(
    spec: inputs.SpecLike, *, without: Collection[str] = (), fidelity: str | None = None, objective: str | None = None
) -> Estimate:
    """Return what `tune` would try, after the checks that it makes before its first trial. Nothing is started or saved.

    The candidates are the first `max_trials` in the order of their predictions; measurements change this order. Of
    several engines, only the first is planned. Raises the errors of `flagcore.errors`.
    """
    file, data = inputs.spec_data(
        spec if objective is None else inputs.changed_spec(spec, {"auto_tuner.objective": objective})
    )
    data = data if fidelity is None else inputs.with_fidelity(data, fidelity)
    run = _EngineRun(data, file, inputs.RUNS, False, without, None, ())
    run.require_ready()
    return estimate(inputs.LoadedSpec(file, data), top=run.spec.control.max_trials, without=without, plan=False)


class _EngineRun:
    """The run of one engine in one folder."""

    def __init__(
        self,
        data: Mapping[str, Any],
        file: Path,
        run_dir: Path,
        new: bool,
        without: Collection[str],
        storage: str | None,
        watch: Collection[str],
    ) -> None:
        spec = inputs.read_spec(inputs.LoadedSpec(file, data), without=without)
        self.spec, self.data, self.base = spec, data, file.parent
        self.new, self.without, self.storage = new, without, storage
        self.engine = plugins.engine_of(spec.work)
        self.launcher, self.strategy = plugins.launcher(spec.launcher), plugins.strategy(spec.strategy)
        self.directory, self.experience, self.name = RunDirectory(run_dir), Experience.of_user(), ""
        self.watchers = Watchers(watch)
        self.network: Mapping[str, float] = {}
        """The measured values of `cluster` keys about the network. They replace those that the spec leaves open."""

    def tune(self, on_event: OnEvent) -> Outcome:
        """Tune, save and report. Raises the error that stopped the run, or EveryTrialFailed if nothing was measured."""

        def on_each(event: Event) -> None:
            self.watchers.on_event(event)
            on_event(event)

        fidelity = self.spec.control.fidelity
        self.require_ready()
        with self.watchers, ExitStack() as agents, inputs.loaded_plugins(self.without) as loaded:
            if self.spec.on_each_host and fidelity != ESTIMATE:
                loaded.use_devices(*self._use_hosts(agents))
            dependencies = Dependencies(
                plugins=loaded,
                engine=self.engine,
                launcher=self.launcher,
                strategy=self.strategy,
                open_store=self._open_store,
                on_event=on_each,
                past=lambda problem: past_of_problem(problem, loaded, self.name),
                probe_strategy=plugins.strategy(PROBE_STRATEGY),
            )
            try:
                result = run_loop(self.spec, dependencies, self._completed_baseline())
                outcome = self._save(result)
                self.watchers.finish(outcome.data)
            finally:
                self.directory.close()
        if isinstance(result.error, Interrupted):
            raise Interrupted(_("interrupted; finished trials are in {folder}", folder=self.directory.path))
        if result.error:
            raise result.error
        if result.plan.best is None:
            error = EveryTrialFailed if result.plan.fastest is None else NothingFits
            raise error(no_best(outcome.shown))
        return outcome

    def require_ready(self) -> None:
        """Raise UsageError, NoDevice or SpecError if the trials of the spec cannot start here."""
        fidelity = self.spec.control.fidelity
        if fidelity != ESTIMATE:
            self.launcher.require_hosts(self.spec.cluster.hosts)
        if fidelity == RUN:
            self.engine.ready(self.spec.on_nodes(self.spec.trial_nodes))
        if fidelity == PROBE or (fidelity == RUN and self.spec.control.probes):
            probes_of(self.engine).ready(self.spec)

    def _use_hosts(self, agents: ExitStack) -> tuple[tuple[Device, ...], Callable[[Device], Telemetry | None]]:
        """Reserve the spec's hosts. Return their devices, and telemetry until `agents` ends. Raises NoDevice."""
        cluster = self.spec.cluster
        variables = self.spec.envs if self.spec.work.has_steps else None
        check = host_check(self._files(), variables, compare=self.spec.control.compare_hosts)
        hosts = agents.enter_context(self.launcher.use_hosts(cluster, check))
        cluster = replace(cluster, hosts=hosts.names)
        identity = None if self.new else self.directory.identity()
        if identity is not None:
            self.network = identity["fixed"].get("network") or {}
        elif hosts.network and cluster.with_measured(vars(hosts.network)) != cluster:
            self.network = vars(hosts.network)
            warn([hosts.network.note])
        self.spec = replace(self.spec, cluster=cluster.with_measured(self.network))
        return hosts.devices, hosts.telemetry

    def _files(self) -> list[str]:
        """Return the files that a `train.command` may read on every host: those that it names, and the model."""
        words, directory = self.spec.work.command or (), self.spec.work.directory or ""
        model = self.data.get("model")
        named_files = [str(Path(directory, word)) for word in words if os.path.isfile(Path(directory, word))]
        return named_files + ([str((self.base / model).resolve())] if words and isinstance(model, str) else [])

    def _completed_baseline(self) -> Mapping[str, KnobValue] | None:
        """Return the baseline of the run that is resumed, or None. Raises RunError if the storage differs.

        The baseline of the spec stays as the user wrote it: engines pass the user's values on to their programs.
        """
        identity = None if self.new else self.directory.identity()
        if identity is None:
            return None
        fixed_fields = identity["fixed"]
        if fixed_fields.get("storage") != self.storage:
            storage = redact_text(fixed_fields.get("storage") or "its own journal")
            text = N_("{folder} has its trials in {storage}: use the same --storage, or --new")
            raise RunError(_(text, folder=self.directory.path, storage=storage))
        same_spec = identity["task"].get("spec") == redact_data(inputs.without_budget(self.data))
        baseline: Mapping[str, KnobValue] | None = fixed_fields.get("baseline")
        return baseline if same_spec else None

    def _open_store(self, problem: Problem) -> OptunaStore:
        """Lock the run's folder, claim it for this task, and return the store with the trials of earlier calls."""
        from flagcore.tuner.store import OptunaStore  # importing optuna is slow

        directory, storage = self.directory, self.storage
        directory.open(new=self.new)
        warn_about_problem(problem)
        if self.spec.control.fidelity == RUN:
            warn(filter(None, [crowded_baseline_text(problem)]))
        candidate = problem.baseline if self.spec.control.fidelity == RUN else None
        warn(self.engine.trial_notes(problem.platform, candidate))
        fixed_fields = {"baseline": problem.baseline.as_dict(), "storage": storage, "network": self.network}
        self.name = directory.claim(inputs.fixed_task(self.data, problem), fixed_fields)
        choices, objective = problem.space.choices, self.spec.objective
        try:
            saved = saved_trials(directory.path, read_result(directory.path))
        except RunError as error:  # the journal has them, too
            file, saved = directory.path / RESULT, ()
            copy = file.with_name(f"{RESULT}.{time.strftime('%Y%m%d-%H%M%S')}")
            with writable(directory.path):
                file.rename(copy)
            warn([error, _("{file} was damaged and is written anew; the old one is {copy}", file=file, copy=copy)])
        saved = tuple(with_known_values(directory.path, saved, problem.space.axes))
        store = OptunaStore(directory.path, choices, run=self.name, objective=objective, url=storage, saved=saved)
        warn(store.notes)
        own_trials = [trial for trial in store.trials() if not trial.source]
        with_known_values(directory.path, own_trials, problem.space.axes)
        fidelity = self.spec.control.fidelity
        highest = max((FIDELITIES.index(trial.fidelity) for trial in own_trials), default=0)
        if highest > FIDELITIES.index(fidelity):  # their result would be overwritten
            text = N_("{folder} has trials of fidelity {higher}, not {fidelity}: use another --run-dir, or --new")
            raise RunError(_(text, folder=directory.path, higher=FIDELITIES[highest], fidelity=fidelity))
        if trials := store.trials():
            finished_count = sum(trial.state is not TrialState.INTERRUPTED for trial in trials)
            text = ngettext(
                "resuming {folder}: {count} trial done",
                "resuming {folder}: {count} trials done",
                finished_count,
                folder=directory.path,
            )
            warn([text + "; " + _("--new starts over")])
        inputs.write_spec(directory.path, self.data, self.base)
        self.watchers.begin(self.name, str(directory.path.resolve()), problem.platform.task, self.data)
        return store

    def _save(self, result: TuneResult) -> Outcome:
        folder = self.directory.path
        outcome = save(result, folder, inputs.with_fidelity(inputs.with_absolute_paths(self.data, self.base)))
        warn(noise_warnings(result.plan))
        warn(notes_of(outcome.data))
        try:
            self.experience.save(self.name, result.problem.platform, result.plan.trials)
        except RunError as error:
            warn([_("later runs cannot use the measurements of this run: {reason}", reason=error)])
        return replace(outcome, reported=save_report(folder, result, outcome.data))


WINNERS = ("best", "best.sh", "best.yaml")
"""The files of the best configuration, which are copied from the folder of the best engine."""


def each_engine(
    data: Mapping[str, Any],
    engines: tuple[str, ...],
    run_dir: Path,
    tune_one: Callable[[dict[str, Any], Path], Outcome],
) -> Outcome:
    """Tune `data` with each of `engines` in a folder below `run_dir`, and return the outcome of the best engine.

    Each engine gets an equal share of the trials and of the time. An engine that cannot be tuned is skipped with a
    warning. If none can be tuned, an error of the first one's kind is raised.
    """
    done: dict[str, Outcome] = {}
    failed: dict[str, FlagError] = {}
    for engine in engines:
        try:
            selected = select_engine(data, engine, plugins.kinds())
            done[engine] = tune_one(_budget_share(selected, len(engines)), run_dir / engine)
            if done[engine].plan.stopped_because == STOPPED:
                break
        except (Interrupted, HostLost):
            raise
        except FlagError as error:
            same = next((name for name, other in failed.items() if str(other) == str(error)), None)
            warn([f"{engine}: {error}" if same is None else _("{engine}: like {other}", engine=engine, other=same)])
            failed[engine] = error
    if not done:
        first = next(iter(failed.values()))
        kind = UsageError if isinstance(first, UsageError) else type(first)
        raise kind(_("no engine can be tuned: {engines}", engines=", ".join(failed))) from first
    order = sorted(done, key=lambda engine: _best_s(done[engine].plan))
    winner = done[order[0]]
    parts = {engine: done[engine].data for engine in order} | {
        e: {"error": redact_text(str(failed[e]))} for e in failed
    }
    result = {**winner.data, "run_dir": str(run_dir), "engine": order[0], "engines": parts}
    with writable(run_dir):
        _copy_best(run_dir / order[0], run_dir)
        write(run_dir / "result.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        inputs.write_spec(run_dir, data, run_dir)
    return replace(winner, run_dir=run_dir, data=result)


def _copy_best(source: Path, target: Path) -> None:
    for name in WINNERS:
        if (target / name).is_symlink():
            (target / name).unlink()
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True, copy_function=_replace)
        elif (source / name).exists():
            _replace(source / name, target / name)
        else:
            (target / name).unlink(missing_ok=True)


def _replace(source: Path | str, target: Path | str) -> None:
    """Copy a file. A link is replaced, not followed."""
    Path(target).unlink(missing_ok=True)
    shutil.copy2(source, target)


def _budget_share(data: dict[str, Any], parts: int) -> dict[str, Any]:
    tuner = dict(data.get("auto_tuner") or {})
    control = dict(tuner.get("control") or {})
    if isinstance(control.get("max_trials", 20), int):
        control["max_trials"] = max(1, control.get("max_trials", 20) // parts)
    max_time = control.get("max_time")
    if seconds := parse_amount(max_time, SECONDS) if isinstance(max_time, str) else max_time:
        control["max_time"] = seconds / parts
    return {**data, "auto_tuner": {**tuner, "control": control}}


def _best_s(plan: Plan) -> float:
    """Return the median step time of the best in seconds. If the objective is a rate, it is the inverse of the rate."""
    best = plan.best
    times = (plan.median_s(best), best.step_seen_s, best.predicted_step_s) if best else ()
    return next(filter(None, times), math.inf)
