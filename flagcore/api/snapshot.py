"""The state of a spec or of a run's folder: predictions, results of trials, and measurements of earlier runs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flagcore.api.inputs import UNNAMED, LoadedSpec, OpenedSpec, SpecLike, open_spec
from flagcore.api.jobs import detailed_predictions, past_of_problem
from flagcore.api.runs import SPEC, Run, load_run, trial_fields
from flagcore.contracts import Problem, SearchContext
from flagcore.domain.prediction import PastMeasurements, Prediction
from flagcore.domain.space import Axis, Candidate, Columns, Pruned
from flagcore.domain.spec import Spec, Task
from flagcore.domain.trial import RUN, Trial
from flagcore.errors import RunError, UsageError
from flagcore.i18n import _
from flagcore.plugins.loaded import LoadedPlugins
from flagcore.tuner.run_folder import RunDirectory
from flagcore.tuner.search_state import SearchState
from flagcore.tuner.stages.predict import predict_columns
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import search_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A problem and the state of its search. For a spec, `run` is None and the search has no trials.

    `pruned`: the rows that rules and trials removed. `context`: the current input of the strategy.
    """

    where: Path
    plugins: LoadedPlugins
    problem: Problem
    search_state: SearchState
    pruned: Pruned
    context: SearchContext
    run: Run | None = None

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
            f"{rule.name}: {rule.message}" for rule in self.problem.rules if rule.prunes(columns, predictions).any()
        ]

    def predicted(self, columns: Columns) -> Prediction:
        """Return the prediction of a candidate, which may be outside the space, like `detailed_predictions`."""
        return detailed_predictions(self.problem.platform, columns)[0]


def load_snapshot(where: SpecLike, chip: str | None, without: Collection[str]) -> Snapshot:
    """Return the state of a spec, or of the run in a folder. Raises the errors of `flagcore.errors`."""
    place = UNNAMED if isinstance(where, Mapping) else Path(where)
    if isinstance(where, (Mapping, LoadedSpec)) or not place.is_dir():
        return _snapshot(place, open_spec(where, chip, without, plan=True), None, PastMeasurements.empty())
    run = load_run(place)
    if chip is not None:
        raise UsageError(_("--chip {chip} works only with a spec, but {run} is a run directory", chip=chip, run=place))
    home = run_home(run)
    identity = RunDirectory(home).identity() or {"run": "", "task": {}, "fixed": {}}
    opened = open_spec(home / SPEC, None, without, change=partial(_with_its_hardware, stored=identity))
    run = _with_known_values(run, opened.problem.space.axes)
    return _snapshot(place, opened, run, past_of_problem(opened.problem, opened.plugins, identity["run"]))


def run_home(run: Run) -> Path:
    """Return the folder with the trials of a run, of the best engine if several engines were tuned."""
    return run.folder / str(run.data["engine"]) if run.engines else run.folder


def _with_its_hardware(spec: Spec, stored: Mapping[str, Any]) -> Spec:
    """Return the spec of a run with its saved hardware, network and baseline, as on the machine of the run."""
    network = stored["fixed"].get("network") or {}
    spec = replace(spec, baseline=stored["fixed"].get("baseline"), cluster=spec.cluster.with_measured(network))
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
    """Return a run whose candidates have a value for each knob.

    Knobs that are newer than the run get their neutral value. Raises RunError if a trial has a value that its knob does
    not support, because another version wrote the run.
    """
    stored, complete = all_trials(run), []
    for trial in stored:
        values = trial.candidate.as_dict()
        for axis in axes:
            value = values.get(axis.knob, axis.neutral)
            try:
                axis.encode(value)
            except ValueError:
                names = {"folder": run.folder, "number": trial.number, "knob": axis.knob, "value": value}
                text = _("{folder} was written by another version: trial {number} has {knob} = {value}", **names)
                raise RunError(text) from None
        is_complete = all(axis.knob in values for axis in axes)
        values = {axis.knob: axis.neutral for axis in axes} | values
        complete.append(trial if is_complete else replace(trial, candidate=Candidate.of(values)))
    return run if complete == stored else replace(run, **trial_fields(complete, run.fidelity))


def _snapshot(where: Path, opened: OpenedSpec, run: Run | None, past: PastMeasurements) -> Snapshot:
    problem = opened.problem
    search_state = run.search_state if run else SearchState()
    pruned = prune_by_trials(problem, search_state.trials, search_state.probes)
    context = search_context(replace(problem, pruned=pruned), search_state, past)
    return Snapshot(
        where=where,
        plugins=opened.plugins,
        problem=problem,
        search_state=search_state,
        pruned=pruned,
        context=context,
        run=run,
    )
