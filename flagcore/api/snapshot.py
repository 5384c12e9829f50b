"""The state of a spec or of a run's folder: predictions, results of trials, and measurements of earlier runs."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flagcore import plugins
from flagcore.api.inputs import UNNAMED, LoadedSpec, SpecLike, loaded_plugins, read_spec, warn_about_problem
from flagcore.api.planning.estimate import build_problem_of_spec, prediction_records
from flagcore.api.runs import SPEC, Run, load_run, trial_fields
from flagcore.contracts import Platform, Problem, SearchContext, Workload
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.effects import engine_task
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Observations, PastMeasurements, features
from flagcore.domain.search_state import Pruned, SearchState
from flagcore.domain.space import Axis, Candidate, Columns
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.domain.trial import RUN, Trial
from flagcore.errors import FlagError, RunError, UsageError
from flagcore.i18n import _
from flagcore.plugins import LoadedPlugins, engines
from flagcore.tuner.calibration import Experience
from flagcore.tuner.learning.trials import MEMORY_NOISE, MIN_NOISE
from flagcore.tuner.problem import build_problem, candidate_columns
from flagcore.tuner.stages.build import canonical, legality
from flagcore.tuner.stages.discover import costs
from flagcore.tuner.stages.predict import predict_columns
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import search_context
from flagcore.tuner.store.directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A problem and the state of its search. For a spec, `run` is None and the search has no trials.

    `pruned`: the rows that rules and trials removed. `context`: the current input of the strategy.
    """

    where: Path
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

    def pruned_by(self, columns: Columns) -> list[str]:
        """Return the messages of the pruning rules that remove a candidate, which may be outside the space."""
        predictions = predict_columns(self.problem.platform, columns)
        return [
            f"{rule.name}: {rule.message}" for rule in self.problem.rules if rule.prunes(columns, predictions).any()
        ]

    def record(self, columns: Columns) -> dict[str, Any]:
        """Return the prediction of a candidate, inside the space or not, with the components of its worst stage."""
        return prediction_records(self.problem.platform, columns)[0]


def load_snapshot(where: SpecLike, chip: str | None, without: Collection[str]) -> Snapshot:
    """Return the state of a spec, or of the run in a folder. Raises the errors of `flagcore.errors`."""
    place = UNNAMED if isinstance(where, Mapping) else Path(where)
    if isinstance(where, (Mapping, LoadedSpec)) or not place.is_dir():
        problem = build_problem_of_spec(where, chip, without, plan=True)
        return _snapshot(place, problem, None, PastMeasurements.empty())
    run = load_run(place)
    if chip is not None:
        raise UsageError(_("--chip {chip} needs a spec; {run} is a run", chip=chip, run=place))
    home = run_home(run)
    identity = RunDirectory(home).identity() or {"run": "", "task": {}, "fixed": {}}
    spec = _with_its_hardware(read_spec(home / SPEC, None, without), identity)
    with loaded_plugins(without) as loaded:
        problem = build_problem(spec, loaded, plugins.workload_of(spec.work))
        run = _with_known_values(run, problem.space.axes)
        past = past_of_problem(problem, loaded, identity["run"])
        snapshot = _snapshot(place, problem, run, past)
    warn_about_problem(problem)
    return snapshot


def run_home(run: Run) -> Path:
    """Return the folder with the trials of a run.

    If several engines were tuned, it is the folder of the best engine.
    """
    return run.folder / str(run.data["engine"]) if run.engines else run.folder


def _with_its_hardware(spec: Spec, stored: Mapping[str, Any]) -> Spec:
    """Return the spec of a run with its saved hardware and baseline, so that it does not depend on this machine."""
    spec = replace(spec, baseline=stored["fixed"].get("baseline"))
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


def _snapshot(where: Path, problem: Problem, run: Run | None, past: PastMeasurements) -> Snapshot:
    search_state = run.search_state if run else SearchState()
    pruned = prune_by_trials(problem, search_state.trials, search_state.probes)
    context = search_context(replace(problem, pruned=pruned), search_state, past)
    return Snapshot(where=where, problem=problem, search_state=search_state, pruned=pruned, context=context, run=run)


GIB = 2**30
MAX_PAST = 300
"""Maximum number of earlier measurements. Chosen to limit the run time of the model, which is cubic in this number."""
MAX_LOG_RATIO = 3.0
"""A record is skipped if the logarithm of measured over predicted exceeds this (a factor of 20). Chosen by hand: such a
factor is not a model error."""


def past_of_problem(problem: Problem, plugins: LoadedPlugins, run: str) -> PastMeasurements:
    """Return the measurements of earlier runs, except `run`, on the chip of a problem.

    The result is empty if the spec disables them.
    """
    spec, chip = problem.task.spec, problem.task.cluster.groups[0].chip
    if not spec.control.use_experience:
        return PastMeasurements.empty()
    records = Experience.of_user().records(chip, spec.work.engine, exclude_run=run)
    return past(records, chip, plugins, problem.workload, spec.objective, problem.platform.knobs)


def past(
    records: Iterable[Mapping[str, Any]],
    chip: Chip,
    plugins: LoadedPlugins,
    workload: Workload,
    objective: str,
    knobs: Sequence[Knob] = (),
) -> PastMeasurements:
    """Return observations from the measured records of `chip`.

    Records that cannot be read or predicted, and records of servers with another `objective`, are skipped. `knobs` are
    the plugins' knobs that a record may contain.
    """
    from flagcore.spec.jobs import read_job  # takes long to import, and is needed only if there are earlier runs

    tasks: dict[str, list[tuple[Task, Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    installed = engines()
    for job_record in islice(records, MAX_PAST):
        with suppress(FlagError, KeyError, TypeError, ValueError):
            kind = job_record["kind"]
            work_data = dict(job_record[kind])
            command = tuple(work_data.pop("command", None) or ()) or None  # a job record has no key for the command
            if kind == "serve" and job_record["measured"]["objective"] != objective:
                continue
            engine_values = dict(job_record["candidate"])
            own_knobs = tuple(knob for knob in knobs if knob.name in engine_values)
            plugin_values = {knob.name: engine_values.pop(knob.name) for knob in own_knobs}
            for knob in own_knobs:
                knob.parse(plugin_values[knob.name], knob.name)
            job = read_job({**job_record, kind: work_data, "candidate": engine_values}, installed)
            work = replace(job.work, command=command)
            nodes = job.devices // job.devices_per_node
            group = NodeGroup(chip=chip, nodes=nodes, devices_per_node=job.devices_per_node)
            spec = Spec(model=job.model, cluster=ClusterSpec(chip=chip.name), work=work, objective=objective)
            task = Task(spec=spec, cluster=Cluster(groups=(group,)), knobs=own_knobs)
            key = repr((job.model, work, group, sorted(plugin_values)))
            tasks[key].append((task, {**job.candidate, **plugin_values}, job_record["measured"]))
    past_points = []
    for number, members in enumerate(tasks.values(), start=1):
        with suppress(FlagError, TypeError, ValueError, ArithmeticError):
            past_points.append(_observations(number, members, plugins, workload))
    return PastMeasurements(
        time=Observations.join([time for time, _ in past_points]),
        memory=Observations.join([memory for _, memory in past_points]),
    )


def _observations(
    number: int,
    members: list[tuple[Task, Mapping[str, Any], Mapping[str, Any]]],
    plugins: LoadedPlugins,
    workload: Workload,
) -> tuple[Observations, Observations]:
    """Return the observed step times and memory of the records `members`, which are runs of task `number`."""
    task = members[0][0]
    group_costs = costs(task.cluster, plugins, task.spec.work.engine)
    platform = Platform(task=task, workload=workload, costs=group_costs)
    legal = legality(platform)
    encoded = [candidate_columns(platform, candidate) for _, candidate, _ in members]
    columns = {knob: np.concatenate([one_row[knob] for one_row in encoded]) for knob in encoded[0]}
    columns = canonical(columns, legal.merges)
    predictions = predict_columns(platform, columns)
    known_features = features(legal.axes, columns, predictions, workload.sizes(engine_task(task), columns))
    figures = (("step_time_s", predictions.step_time_s, 1.0), ("device_used_gib", predictions.device_used_bytes, GIB))
    pairs = []
    for name, expected, unit in figures:
        measured_values = np.array([float(each.get(name) or math.nan) * unit for _, _, each in members])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.log(measured_values) - np.log(expected)
        rows = np.flatnonzero(np.abs(ratio) < MAX_LOG_RATIO)
        min_noise = MIN_NOISE if unit == 1.0 else MEMORY_NOISE
        pairs.append(
            Observations(
                known_features.take(rows), ratio[rows], np.full(rows.size, min_noise), np.full(rows.size, number)
            )
        )
    return pairs[0], pairs[1]
