"""Reads a run's folder, and the state of a spec or run: predictions, trials, and measurements of earlier runs."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flagcore import plugins
from flagcore.api.inputs import UNNAMED, LoadedSpec, OpenedSpec, SpecLike, knobs_of_spec, open_spec
from flagcore.api.jobs import detailed_predictions
from flagcore.api.notes import warn
from flagcore.contracts import Problem, SearchContext
from flagcore.domain.features import PastMeasurements
from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.knob import Knobs
from flagcore.domain.plan import Speedup
from flagcore.domain.prediction import Prediction
from flagcore.domain.secrets import redact_text
from flagcore.domain.space import Axis, Candidate, Columns, Pruned
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import ESTIMATE, FIDELITIES, RUN, Trial
from flagcore.errors import EveryTrialFailed, FlagError, NothingFits, RunError, SpecError, UsageError
from flagcore.i18n import N_, _
from flagcore.plugins.loaded import LoadedPlugins
from flagcore.report.formats import COLUMNS, Notebook, render
from flagcore.report.result import Result, TrialResult
from flagcore.report.run import RunData
from flagcore.report.summary import no_best
from flagcore.report.text import best_text, candidate_columns
from flagcore.spec.plain_data import spec_as_data
from flagcore.tuner.journal import JOURNAL, MAX_GAP, Journal, read_journal
from flagcore.tuner.run_folder import IDENTITY, RunDirectory
from flagcore.tuner.search_state import SearchState, speedup
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.predict import predict_columns
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import search_context

RESULT, SPEC = "result.json", "spec.yaml"
RUNNING, FINISHED, INTERRUPTED = N_("running"), N_("finished"), N_("interrupted")
UNMEASURED, UNREADABLE = N_("no measurement"), N_("unreadable")
"""States of a run. A run is interrupted if no process holds it, and its result gives no reason why it stopped."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run(Notebook):
    """The content of a run's folder. The run may be finished, interrupted or in progress.

    Units are seconds and bytes, as in `flagcore.domain.trial`.

    - `spec`: the spec's data with absolute paths.
    - `data`: the content of `result.json`, empty if the run was killed before it was written.
    - `trials`: one trial per candidate in order of execution.
    - `repeats`: the final repeated runs of the baseline, the best and its rivals.
    - `probes`: the trials of a lower fidelity.
    - `imported`: the trials of another tool.
    - `speedup`: the speedup of the best over the baseline. None if unknown.
    - `engines`: the runs of each engine if several were tuned; the other fields are then from the run of the best
      engine.
    - `search_state`: the state of the search after all trials.
    - `notes`: what is damaged in the folder, in words.
    """

    folder: Path
    spec: Mapping[str, Any]
    data: Mapping[str, Any]
    fidelity: str
    trials: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    speedup: Speedup | None
    search_state: SearchState
    repeats: tuple[Trial, ...] = ()
    probes: tuple[Trial, ...] = ()
    imported: tuple[Trial, ...] = ()
    engines: Mapping[str, Run] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float | None:
        """The speed of the best over that of the baseline, minus one: 0.25 is 25% faster. None if unknown."""
        return self.speedup.value if self.speedup else None

    @property
    def knobs(self) -> Knobs:
        """The knobs of the engine by name. It is empty if the engine is not installed here."""
        return knobs_of_spec(self.spec)

    @property
    def in_progress(self) -> bool:
        """Whether the result lacks trials that have ended, because the run is in progress or was killed."""
        if self.engines or self.fidelity == ESTIMATE:
            return False
        return not self.data or ended_trials(self) > count_trials(self.data)

    @property
    def stopped_because(self) -> str | None:
        """Why the search stopped. None if the run is in progress or was killed."""
        reason = self.data.get("stopped_because")
        return None if reason is None or self.in_progress else str(reason)

    @property
    def predictions(self) -> tuple[Mapping[str, Any], ...]:
        """One record per trial, with predicted and measured step times in seconds.

        Each record has `number`, `candidate`, `state`, and three times: `predicted` before all trials, `believed` after
        the earlier trials, and `measured`. Unknown times are None.
        """
        return tuple(
            {
                "number": trial.number,
                "candidate": trial.candidate.as_dict(),
                "state": trial.state.value,
                "measured": trial.measurement.step_time_s if trial.measurement else None,
                "predicted": trial.predicted_step_s,
                "believed": trial.believed.step_time_s if trial.believed else None,
            }
            for trial in self.trials
        )

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per probe, trial and repeat, in the order of their numbers.

        Its columns are the dotted fields of a trial in `result.json`, such as `state`, `candidate.micro_batch_size`
        and `measured.step_time_s.median`. Raises UsageError if pandas is not installed.
        """
        try:
            from pandas import json_normalize
        except ImportError:
            raise UsageError(_("to_dataframe needs pandas: pip install pandas")) from None
        trials = sorted([*self.probes, *self.trials, *self.repeats], key=lambda trial: trial.number)
        return json_normalize([TrialResult.write(each) for each in trials])

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {len(self.trials)} trials, {best_text(self.best, self.speedup, self.knobs)}>"

    def __str__(self) -> str:
        columns = {"trial": "number", **candidate_columns(self.predictions, self.knobs), **COLUMNS["run"]}
        return render(self.predictions, "table", columns)


def load_run(folder: Path | str) -> Run:
    """Read a run's folder, without writing to it or asking a plugin. The run may be in progress.

    Trials that the journal lacks are taken from the result, with a warning that also names damaged lines of the
    journal. Raises RunError if the folder has no run, or a file that cannot be read.
    """
    run = read_run(Path(folder))
    warn(run.notes)
    return run


def read_run(path: Path) -> Run:
    """Read a run's folder as `load_run` does, but without warnings."""
    data = read_result(path)
    if data.get("engines"):
        return _run_of_several_engines(path, data)
    identity = RunDirectory(path).identity()
    if identity is None:
        if data or (path / JOURNAL).exists():
            raise RunError(_("{file} is missing; restore it, or use --new to start over", file=path / IDENTITY))
        raise RunError(_("{folder} is not a run; `flag tune` creates one, in `--run-dir`", folder=path))
    saved, url = saved_trials(path, data), identity["fixed"].get("storage")
    if url:
        from flagcore.tuner.store import stored_trials  # importing optuna is slow

        journal = Journal(trials={each.number: each for each in stored_trials(identity["run"], url)})
    else:
        journal = read_journal(path, identity["run"])
    missing = {each.number: each for each in saved if each.number not in journal.trials}
    notes = journal.notes(redact_text(url) if url else path / JOURNAL, missing)
    trials = tuple(each for _number, each in sorted({**missing, **journal.trials}.items()))
    try:
        spec = saved_spec(path)
    except FlagError as error:
        spec, notes = {}, [*notes, str(error)]
    fidelities = [each.fidelity for each in trials if each.fidelity in FIDELITIES and not each.source]
    fidelity = str(data.get("fidelity") or max(fidelities, key=FIDELITIES.index, default=RUN))
    if fidelity == ESTIMATE:
        plan = _plan_of(path, data)  # trials are predictions, which only the result contains
        fields = {name: plan[name] for name in ("trials", "speedup", "baseline", "best")}
        fields["search_state"] = SearchState()
    else:
        fields = trial_fields(trials, fidelity, _objective(spec, data))
    return Run(folder=path, spec=spec, data=data, fidelity=fidelity, notes=tuple(notes), **fields)


def _objective(spec: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """Return the objective of a run: that of its result or its spec, or else the default of its kind of job."""
    kinds = plugins.kinds()
    default = next((each.default_objective for kind, each in kinds.items() if kind in spec), "")
    named = (data.get("objective") or {}).get("name"), (spec.get("auto_tuner") or {}).get("objective"), default
    return next(filter(None, named), "")


def trial_fields(stored: Sequence[Trial], fidelity: str, objective: str) -> dict[str, Any]:
    """Return the fields of `Run` that can be derived from its stored trials."""
    search_state = learn(stored, fidelity)
    return {
        "trials": search_state.trials,
        "repeats": search_state.repeats,
        "probes": search_state.probes,
        "imported": tuple(trial for trial in stored if trial.source),
        "baseline": search_state.reported_trial(search_state.baseline),
        "best": search_state.reported_trial(search_state.best),
        "speedup": speedup(search_state, objective),
        "search_state": search_state,
    }


def state_of_ended(run: RunData) -> str:
    """Return the state of a run that no process holds, as its result shows it."""
    if run.was_interrupted:
        return INTERRUPTED
    return UNMEASURED if run.is_unmeasured else FINISHED


def no_best_error(run: Run) -> FlagError:
    """Return the error of a command that needs the best candidate of a run that has none or has not ended.

    It is RunError if the run can be resumed, EveryTrialFailed if nothing was measured, and NothingFits if no trial is
    within the limits.
    """
    if run.stopped_because is None:
        command = f"flag tune SPEC --run-dir {shlex.quote(str(run.folder))}"
        text = _("{folder} is in progress, or was killed; `{command}` resumes it", folder=run.folder, command=command)
        return RunError(text)
    shown = RunData.from_json(run.data, run.folder, folder_name=str(run.folder), knobs=run.knobs)
    errors = {INTERRUPTED: RunError, UNMEASURED: EveryTrialFailed, FINISHED: NothingFits}
    text = _("{where} has no best configuration: {reason}", where=run.folder, reason=no_best(shown))
    return errors[state_of_ended(shown)](text)


def unreadable_error(file: Path, error: object) -> RunError:
    """Return the error for a result file that cannot be read."""
    reason = getattr(error, "strerror", None) or (repr(error) if isinstance(error, LookupError) else error)
    return RunError(_("{file} cannot be read ({reason}); `flag tune` writes it anew", file=file, reason=reason))


def read_result(path: Path) -> Mapping[str, Any]:
    """Return the content of `result.json` in the folder of a run. It is empty if there is none.

    Raises RunError with the key, its value and the rule if the content is invalid.
    """
    file = path / RESULT
    try:
        return Result.check(read_regular(file, folder=path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, SpecError) as error:
        raise unreadable_error(file, error) from None


def saved_trials(path: Path, data: Mapping[str, Any]) -> tuple[Trial, ...]:
    """Return the trials in the result of a run, without the predictions of an estimate. Raises RunError."""
    plan = _plan_of(path, data) if data and data["fidelity"] != ESTIMATE and not data.get("engines") else {}
    trials = tuple(trial for name in ("trials", "repeats", "probes") for trial in plan.get(name, ()))
    if trials and (last := max(trial.number for trial in trials)) >= len(trials) + MAX_GAP:
        raise unreadable_error(path / RESULT, f"number = {last}, but there are only {len(trials)} trials")
    return trials


def _plan_of(path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the plan in a result. Raises RunError if its values contradict each other."""
    try:
        return Result.read(data)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise unreadable_error(path / RESULT, error) from None


def saved_spec(path: Path) -> dict[str, Any]:
    """Return the copy of the spec in the folder of a run as data. Raises RunError or SpecError."""
    try:
        open_regular(path / SPEC, path).close()
    except OSError as error:
        raise RunError(_("{file} cannot be read ({why})", file=path / SPEC, why=error.strerror)) from None
    return spec_as_data(path / SPEC)


def _run_of_several_engines(path: Path, data: Mapping[str, Any]) -> Run:
    try:
        names = [name for name, each in data["engines"].items() if "error" not in each]
        if strange := [each for each in names if Path(each).name != each or (path / each).is_symlink()]:
            raise ValueError(f"engines.{strange[0]} is not a folder of this run")
        best_engine = str(data["engine"])
        if best_engine not in names:
            raise ValueError(f"engine = {best_engine} did not run")
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable_error(path / RESULT, error) from None
    runs = {name: read_run(path / name) for name in names}
    notes = dict.fromkeys(note for run in runs.values() for note in run.notes)
    return replace(runs[best_engine], folder=path, data=data, engines=runs, notes=tuple(notes))


def ended_trials(run: Run) -> int:
    """Return the number of trials that have ended."""
    return len(run.trials) + len(run.repeats) + len(run.probes)


def count_trials(data: Mapping[str, Any]) -> int:
    """Return the number of trials in a result."""
    return sum(len(data.get(name) or ()) for name in ("trials", "repeats", "probes"))


class Snapshot(NamedTuple):
    """A problem and the state of its search. For a spec, `run` is None and the search has no trials.

    `context`: the current input of the strategy.
    """

    where: Path
    plugins: LoadedPlugins
    problem: Problem
    search_state: SearchState
    context: SearchContext
    run: Run | None = None

    @property
    def pruned(self) -> Pruned:
        """The rows that rules and trials removed."""
        return self.context.problem.pruned

    @property
    def task(self) -> Task:
        """The job of the spec with its cluster."""
        return self.problem.task

    @property
    def fidelity(self) -> str:
        """The fidelity of the run's trials. For a spec, it is the fidelity of the trials that it would run."""
        return self.run.fidelity if self.run else RUN

    @property
    def has_trials(self) -> bool:
        """Whether anything was measured or probed."""
        return bool(self.search_state.trials or self.search_state.probes)

    def pruned_by(self, columns: Columns) -> list[str]:
        """Return the messages of the pruning rules that remove a candidate, which may be outside the space."""
        predictions = predict_columns(self.problem.platform, columns)
        return [
            f"{rule.name}: {_(rule.message)}" for rule in self.problem.rules if rule.prunes(columns, predictions).any()
        ]

    def predicted(self, columns: Columns, row: int | None) -> Prediction:
        """Return the prediction of a candidate, like `detailed_predictions`. `row`: None if it is outside the space."""
        known = None if row is None else self.problem.predictions.take(np.array([row]))
        return detailed_predictions(self.problem.platform, columns, known)[0]


def columns_of(snapshot: Snapshot, candidate: Candidate) -> Columns:
    """Encode a candidate as columns with one row."""
    values, axes = candidate.as_dict(), snapshot.problem.space.axes
    return {axis.knob: np.array([axis.encode(values.get(axis.knob, axis.neutral))]) for axis in axes}


def load_snapshot(where: SpecLike, chip: str | None, without: Collection[str]) -> Snapshot:
    """Return the state of a spec, or of the run in a folder. Raises the errors of `flagcore.errors`."""
    place = UNNAMED if isinstance(where, Mapping) else Path(where)
    if isinstance(where, (Mapping, LoadedSpec)) or not place.is_dir():
        return snapshot_of(open_spec(where, chip, without, plan=True), place)
    run = load_run(place)
    if chip is not None:
        raise UsageError(_("--chip {chip} works only with a spec, but {run} is a run directory", chip=chip, run=place))
    home = run_home(run)
    identity = RunDirectory(home).identity() or {"run": "", "task": {}, "fixed": {}}
    change, completed = partial(_with_its_hardware, stored=identity), identity["fixed"].get("baseline")
    opened = open_spec(home / SPEC, None, without, change=change, completed=completed)
    return snapshot_of(opened, place, _with_known_values(run, opened.problem.space.axes))


def run_home(run: Run) -> Path:
    """Return the folder with the trials of a run, of the best engine if several engines were tuned."""
    return run.folder / str(run.data["engine"]) if run.engines else run.folder


def _with_its_hardware(spec: Spec, stored: Mapping[str, Any]) -> Spec:
    """Return the spec of a run with its saved hardware and network, as on the machine of the run."""
    network = stored["fixed"].get("network") or {}
    spec = replace(spec, cluster=spec.cluster.with_measured(network))
    if precision := stored["task"].get("precision"):
        spec = replace(spec, work=replace(spec.work, precision=precision))
    hardware = stored["task"].get("hardware") or {}
    if spec.cluster.groups or not {"chip", "devices_per_node"} <= hardware.keys():
        return spec
    chip, devices = str(hardware["chip"]), int(hardware["devices_per_node"])
    return replace(spec, cluster=replace(spec.cluster, chip=chip, devices_per_node=devices))


def all_trials(run: Run | None) -> list[Trial]:
    """Return all trials of a run in order, including repeats, probes and imported trials.

    Without a run, there are none.
    """
    trials = (*run.imported, *run.probes, *run.trials, *run.repeats) if run else ()
    return sorted({trial.number: trial for trial in trials}.values(), key=lambda trial: trial.number)


def _with_known_values(run: Run, axes: Sequence[Axis]) -> Run:
    """Return a run whose candidates have a value for each knob. Raises RunError like `with_known_values`."""
    stored = all_trials(run)
    complete = with_known_values(run.folder, stored, axes)
    return (
        run
        if complete == stored
        else replace(run, **trial_fields(complete, run.fidelity, _objective(run.spec, run.data)))
    )


def with_known_values(folder: Path, stored: Sequence[Trial], axes: Sequence[Axis]) -> list[Trial]:
    """Return the trials of the run in `folder` with a value for each knob.

    Knobs that are newer than the run get their neutral value. Raises RunError if a trial has a value that its knob does
    not support, because another version wrote the run.
    """
    complete = []
    for trial in stored:
        values = trial.candidate.as_dict()
        for axis in axes:
            value = values.get(axis.knob, axis.neutral)
            try:
                axis.encode(value)
            except ValueError:
                names = {"folder": folder, "number": trial.number, "knob": axis.knob, "value": value}
                text = _("{folder} was written by another version: trial {number} has {knob} = {value}", **names)
                raise RunError(text) from None
        is_complete = all(axis.knob in values for axis in axes)
        values = {axis.knob: axis.neutral for axis in axes} | values
        complete.append(trial if is_complete else replace(trial, candidate=Candidate.of(values)))
    return complete


def snapshot_of(opened: OpenedSpec, where: Path = UNNAMED, run: Run | None = None) -> Snapshot:
    """Return the state of a spec or run, without other runs: they would change the predictions of a finished run."""
    problem, state = opened.problem, run.search_state if run else SearchState()
    pruned = prune_by_trials(problem, state.trials, state.probes)
    context = search_context(replace(problem, pruned=pruned), state, PastMeasurements.empty())
    return Snapshot(where=where, plugins=opened.plugins, problem=problem, search_state=state, context=context, run=run)
