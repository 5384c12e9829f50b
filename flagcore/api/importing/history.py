"""Read the configuration of another tuner, and add its trials to a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from flagcore import plugins
from flagcore.api.common.candidate_parser import as_candidate
from flagcore.api.common.context import build_problem_of_spec
from flagcore.api.common.inputs import RUNS, SpecLike, fixed_task, spec_data, with_absolute_paths
from flagcore.api.explaining.elimination import broken_rules_of
from flagcore.calibration import Experience
from flagcore.contracts import HistoryReader, HistoryRow, ImportedSpec, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.knob import Knobs
from flagcore.domain.objective import figure_name, seconds
from flagcore.domain.secrets import secrets_in_data
from flagcore.domain.serving import ServeSpec
from flagcore.domain.space import Axis
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.errors import RunError, SpecError, UsageError
from flagcore.problem import Problem, candidate_columns
from flagcore.report.formats import as_yaml
from flagcore.spec.serving import engines_of
from flagcore.stages.build import canonical
from flagcore.stages.predict import record
from flagcore.store import OptunaStore, RunDirectory
from flagcore.store.directory import write

FARTHEST = 20.0
"""A median of measured over predicted beyond this factor, either way, is reported: units may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrials:
    """The trials that were added to a run's folder, and notes on rows that were left out or are doubtful.

    `knobs` are those of the task."""

    run_dir: Path
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    knobs: Knobs = field(default_factory=dict)


def import_history(
    file: Path | str,
    spec: SpecLike,
    *,
    run_dir: Path | str | None = None,
    same_machine: bool = False,
    without: Collection[str] = (),
    importer: str | None = None,
) -> ImportedTrials:
    """Add the rows of another tuner's history as finished trials to `run_dir` (default: as `tune`).

    `spec` is the job that was tuned. With `same_machine` the rows ran on this machine, and their candidates are not run
    again. Otherwise they count as experience of another run. `importer` is needed only if several are installed. Raises
    the errors of `flagcore.errors`, UsageError if no row can be used.
    """
    path, (name, data) = Path(file), spec_data(spec)
    if len(engines_of(data)) > 1:
        raise UsageError(f"{name} names several engines; give a spec with the one whose rows are wanted")
    tool = plugins.importer(importer)
    if not isinstance(tool, HistoryReader):
        raise UsageError(f"{tool.title} has no history that can be imported")
    history = tool.read_history(path)
    problem, workload = build_problem_of_spec(name, None, without, data)
    task = problem.platform.task
    if history.serves != isinstance(task.spec.work, ServeSpec):
        kinds = ("servers", "training") if history.serves else ("training", "servers")
        raise UsageError(f"{path} is of {kinds[0]}, but {name} is of {kinds[1]}")
    role = Role.SEARCH if same_machine else Role.IMPORTED
    reader = _Rows(problem, workload, str(path.resolve()), role, tool.title)
    trials = list(reader.trials(history.rows))
    if not trials:
        raise UsageError(f"no row of {path} can be taken: {'; '.join(reader.notes[:5]) or 'it has none'}")
    folder = Path(run_dir) if run_dir else RUNS / name.stem
    kept = _save(RunDirectory(folder), problem, data, name.parent, trials, experience=not same_machine)
    return ImportedTrials(run_dir=folder, trials=kept, notes=(*reader.notes, *_doubts(trials)), knobs=problem.knobs)


def _save(
    directory: RunDirectory,
    problem: Problem,
    data: Mapping[str, object],
    base: Path,
    trials: list[Trial],
    *,
    experience: bool,
) -> tuple[Trial, ...]:
    """Write the trials into a run's folder, and what they measured for other runs if that is wanted."""
    directory.open()
    try:
        known = directory.known()
        url = known["fixed"].get("storage") if known else None
        run = directory.claim(fixed_task(data, problem), {"baseline": problem.baseline.as_dict(), "storage": url})
        objective = problem.platform.task.spec.objective
        store = OptunaStore(directory.path, problem.space.choices, run=run, objective=objective, url=url)
        if any(trial.source == trials[0].source for trial in store.trials()):
            message = f"{directory.path} has the rows of {trials[0].source} already"
            raise RunError(f"{message}; --run-dir names another folder")
        write(
            directory.path / "spec.yaml",
            as_yaml(with_absolute_paths(data, base)) + "\n",
            private=bool(secrets_in_data(data)),
        )
        kept = tuple(store.add(trial) for trial in trials)
        if experience:
            Experience.of_user().save(f"{run}-imported", problem.platform.task, kept)
    finally:
        directory.close()
    return kept


class _Rows:
    """Turns rows into trials; what is wrong with a row goes to `notes`."""

    def __init__(self, problem: Problem, workload: Workload, source: str, role: Role, title: str) -> None:
        self.problem, self.workload, self.source, self.role = problem, workload, source, role
        self.title = title
        self.notes: list[str] = []
        self._seen: dict[Candidate, int] = {}
        self._figures: dict[tuple[float, ...], int] = {}

    def trials(self, rows: tuple[HistoryRow, ...]) -> Iterator[Trial]:
        """Yield a trial for each row that can be taken."""
        knobs = {axis.knob: axis for axis in self.problem.space.axes}
        unknown = [each for each in dict.fromkeys(knob for row in rows for knob in row.knobs) if each not in knobs]
        if unknown:
            self.notes.append(f"columns that are no knobs here are left out: {', '.join(unknown)}")
        for row in rows:
            if row.refused:
                self.notes.append(f"line {row.line} is left out: {row.refused}")
                continue
            try:
                candidate = self._candidate(row, knobs)
                trial = self._trial(row, candidate)
            except UsageError as error:
                self.notes.append(f"line {row.line} is left out: {error}")
                continue
            self._seen[candidate] = row.line
            yield trial
        named = {knob for row in rows for knob in row.knobs}
        absent = [axis.knob for axis in knobs.values() if len(axis.values) > 1 and axis.knob not in named]
        if absent and self._seen:
            message = "columns that are not there count as off, as 1 or as what follows from the others"
            self.notes.append(f"{message}: {', '.join(absent)}")

    def _candidate(self, row: HistoryRow, knobs: Mapping[str, Axis]) -> Candidate:
        """Return the candidate of a row. Raises UsageError for one that is not in the space."""
        task, space = self.problem.platform.task, self.problem.space
        if row.engine is not None and row.engine != task.spec.work.engine:
            raise UsageError(f"it is of {row.engine}, the spec of {task.spec.work.engine}")
        if row.split:
            raise UsageError("its first or last stage has layers of its own, which are no knobs; see train.settings")
        own = {knob: value for knob, value in row.knobs.items() if knob in knobs}
        values = {knob: value for knob, value in own.items() if value is not None or knobs[knob].neutral is None}
        for knob, value in values.items():
            listed = (*knobs[knob].values, knobs[knob].neutral, None)
            if isinstance(value, int) and value < (knobs[knob].neutral is not None) and value not in listed:
                raise UsageError(f"{knob} = {value} is no size")
        try:
            columns = candidate_columns(task, self.workload, values)
        except SpecError as error:
            raise UsageError(str(error)) from None
        if broken := broken_rules_of(self.problem, columns):
            raise UsageError(f"it breaks {broken[0]['rule']}: {broken[0]['says']}")
        candidate = as_candidate(space.axes, canonical(columns, self.problem.legality.merges))
        if space.find(candidate) is None:
            raise UsageError("the space of the spec does not have it")
        if candidate in self._seen:
            raise UsageError(f"it is the candidate of line {self._seen[candidate]} again")
        return candidate

    def _trial(self, row: HistoryRow, candidate: Candidate) -> Trial:
        task = self.problem.platform.task
        at = self.problem.space.find(candidate)
        assert at is not None
        trial = Trial(
            number=-1,
            candidate=candidate,
            role=self.role,
            state=TrialState.FAILED,
            predicted=record(task, self.problem.predictions.row(at)),
            duration_s=row.elapsed_s,
            source=self.source,
            reason=row.error,
        )
        if row.out_of_memory:
            return replace(trial, state=TrialState.OUT_OF_MEMORY, reason=row.error or f"{self.title} noted OOM")
        measured = _served(task, row) if isinstance(task.spec.work, ServeSpec) else _trained(task, row)
        if measured is None:
            return replace(trial, reason=row.error or "it has no figure of the objective")
        row_figures = tuple(row.figures.values())
        earlier = self._figures.setdefault(row_figures, row.line) if row_figures else row.line
        if earlier != row.line:  # its recorder keeps the figures of the task before where one fails
            reason = f"its figures are those of line {earlier}, as {self.title} repeats them where a task fails"
            return replace(trial, reason=reason)
        return replace(trial, state=TrialState.MEASURED, measurement=measured)


def _trained(task: Task, row: HistoryRow) -> Measurement | None:
    if row.step_s is None:
        return None
    train = task.spec.train
    late = row.cut or row.elapsed_s >= task.spec.control.max_time_per_task
    return Measurement(
        step_times_s=(row.step_s,),
        step_time_s=row.step_s,
        spread_s=0.0,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / row.step_s / task.cluster.devices,
        peak_reserved_bytes=row.reserved_bytes,
        partial=late,
    )


def _served(task: Task, row: HistoryRow) -> Measurement | None:
    """Return the measurement of a server row, None without a figure of the objective.

    Tokens of answers are those of all without the prompts, where all prompts of the load have one length.
    """
    objective, figures, serve = task.spec.objective, dict(row.figures), task.spec.serve
    devices = task.cluster.devices
    load, tokens = serve.loads[0], figures.get("total_tokens_per_s")
    if tokens and load.range_ratio == 1.0 and "requests_per_s" in figures:
        answers = tokens - (load.prefix_len + load.input_len) * figures["requests_per_s"]
        if answers > 0.0:
            figures |= {"output_tokens_per_s": answers, "output_tokens_per_s_per_device": answers / devices}
    name = figure_name(objective)
    if name not in figures:
        return None
    step = seconds(objective, figures[name])
    missing = [each for each in task.spec.limits if figures.get(each, np.inf) > task.spec.limits[each]]
    return Measurement(
        step_times_s=(step,),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=(tokens or 0.0) / devices,
        figures=figures,
        broken=tuple(f"{each} is {_limit_text(figures, each)}" for each in missing),
    )


def _limit_text(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.4g} s, over its limit" if name in figures else "not measured"


def _doubts(trials: list[Trial]) -> list[str]:
    """Return a line if what was measured is far from everything that is predicted."""
    ratios = []
    for trial in trials:
        step = trial.predicted.get("step_time_s")
        if trial.measurement and isinstance(step, Mapping):
            ratios.append(trial.measurement.step_time_s / float(step["value"]))
    middle = float(np.median(ratios)) if ratios else 1.0
    if 1.0 / FARTHEST < middle < FARTHEST:
        return []
    return [f"measured steps are {middle:.3g} times the predicted ones: are they milliseconds, and of this job?"]


def read_tree(
    directory: Path, name: str, overrides: Sequence[str] = (), *, importer: str | None = None
) -> ImportedSpec:
    """Return the configuration `name` in `directory`, as an installed importer reads it. Raises SpecError, UsageError.

    `overrides` are a.b=c. `importer` is needed only if several are installed.
    """
    return plugins.importer(importer).read_tree(directory, name, overrides)
