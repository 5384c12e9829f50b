"""Reads the configuration of another tuner, and adds its trials to a run."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from flagcore import plugins
from flagcore.api.candidate_parser import broken_rules_of
from flagcore.api.inputs import RUNS, LoadedSpec, SpecLike, fixed_task, spec_data, validate_engines, write_spec
from flagcore.api.snapshot import build_problem_of_spec
from flagcore.contracts import HistoryReader, HistoryRow, ImportedSpec, Problem
from flagcore.domain.knob import Knobs
from flagcore.domain.plan import measured_to_predicted
from flagcore.domain.serving import ServeSpec
from flagcore.domain.space import Axis, Candidate, as_candidate
from flagcore.domain.spec import Task, figure_name, seconds
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.errors import RunError, SpecError, SpecErrors, UsageError
from flagcore.i18n import _
from flagcore.spec.serving import engines_of
from flagcore.tuner.calibration import Experience
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.stages.build import canonical
from flagcore.tuner.stages.predict import record
from flagcore.tuner.store.directory import RunDirectory

MAX_FACTOR = 20.0
"""A warning about units is given if the median ratio between measured and predicted times exceeds this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrials:
    """The trials that were added to a run's folder, and notes on skipped and implausible rows.

    `knobs` are the knobs of the task by name.
    """

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
    """Add the rows of another tuner's history to `run_dir` as finished trials.

    `spec` is the job that was tuned. `run_dir` has the same default as in `tune`. With `same_machine`, the rows were
    measured on this machine, and their candidates are not run again. Otherwise, they count as trials of another run.
    `importer` is needed only if several importers are installed. Raises the errors of `flagcore.errors`, and UsageError
    if no row can be used.
    """
    path, (name, data) = Path(file), spec_data(spec)
    if len(engines_of(data)) > 1:
        raise UsageError(_("{file} names several engines: use a spec with the tuned engine only", file=name))
    tool = plugins.importer(importer)
    if not isinstance(tool, HistoryReader):
        raise UsageError(_("{tool} does not support the import of a history", tool=tool.title))
    history = tool.read_history(path)
    problem = build_problem_of_spec(LoadedSpec(name, data), None, without)
    task = problem.platform.task
    if history.serves != isinstance(task.spec.work, ServeSpec):
        kinds = (_("serving"), _("training")) if history.serves else (_("training"), _("serving"))
        raise UsageError(f"{path}: {kinds[0]}; {name}: {kinds[1]}")
    role = Role.SEARCH if same_machine else Role.IMPORTED
    limit = task.spec.control.max_time_per_task or history.time_limit_s
    reader = _RowConverter(problem, str(path.resolve()), role, tool.title, limit)
    trials = list(reader.trials(history.rows))
    if not trials:
        reasons = "; ".join(reader.notes[:5]) or _("it has none")
        raise UsageError(_("no row of {file} can be imported: {reasons}", file=path, reasons=reasons))
    folder = Path(run_dir) if run_dir else RUNS / name.stem
    saved_trials = _save(RunDirectory(folder), problem, data, name.parent, trials, experience=not same_machine)
    return ImportedTrials(
        run_dir=folder, trials=saved_trials, notes=(*reader.notes, *_plausibility_warning(trials)), knobs=problem.knobs
    )


def _save(
    directory: RunDirectory,
    problem: Problem,
    data: Mapping[str, object],
    base: Path,
    trials: list[Trial],
    *,
    experience: bool,
) -> tuple[Trial, ...]:
    """Write the trials to the folder of a run and, with `experience`, their measurements for use by other runs."""
    from flagcore.tuner.store.trials import OptunaStore  # importing optuna is slow

    directory.open()
    try:
        identity = directory.identity()
        url = identity["fixed"].get("storage") if identity else None
        run = directory.claim(fixed_task(data, problem), {"baseline": problem.baseline.as_dict(), "storage": url})
        objective = problem.platform.task.spec.objective
        store = OptunaStore(directory.path, problem.space.choices, run=run, objective=objective, url=url)
        if any(trial.source == trials[0].source for trial in store.trials()):
            source = trials[0].source
            raise RunError(
                _("{folder} has the rows of {file}: use another --run-dir", folder=directory.path, file=source)
            )
        write_spec(directory.path, data, base)
        saved_trials = tuple(store.add(trial) for trial in trials)
        if experience:
            Experience.of_user().save(f"{run}-imported", problem.platform.task, saved_trials)
    finally:
        directory.close()
    return saved_trials


@dataclass(slots=True)
class _RowConverter:
    """Converts the rows of a tool's history to trials. Problems of a row are added to `notes`."""

    problem: Problem
    source: str
    role: Role
    title: str
    limit_s: float
    notes: list[str] = field(default_factory=list)
    lines: dict[Candidate, int] = field(default_factory=dict)
    lines_of_figures: dict[tuple[float, ...], int] = field(default_factory=dict)

    def trials(self, rows: tuple[HistoryRow, ...]) -> Iterator[Trial]:
        """Yield a trial for each valid row."""
        knobs = {axis.knob: axis for axis in self.problem.space.axes}
        unknown = [each for each in dict.fromkeys(knob for row in rows for knob in row.knobs) if each not in knobs]
        if unknown:
            self.notes.append(_("columns that are not knobs are skipped: {names}", names=", ".join(unknown)))
        for row in rows:
            try:
                candidate = self._candidate(row, knobs)
            except UsageError as error:
                self.notes.append(_("line {number} is skipped: {reason}", number=row.line, reason=error))
                continue
            self.lines[candidate] = row.line
            yield self._trial(row, candidate)
        knob_names = {knob for row in rows for knob in row.knobs}
        absent_knobs = [axis.knob for axis in knobs.values() if len(axis.values) > 1 and axis.knob not in knob_names]
        if absent_knobs and self.lines:
            self.notes.append(_("missing columns have their defaults: {names}", names=", ".join(absent_knobs)))

    def _candidate(self, row: HistoryRow, knobs: Mapping[str, Axis]) -> Candidate:
        """Return the candidate of a row. Raises UsageError if it is not in the space."""
        task, space = self.problem.platform.task, self.problem.space
        if row.refused:
            raise UsageError(row.refused)
        if row.engine is not None and row.engine != task.spec.work.engine:
            raise UsageError(_("its engine is {engine}, not {wanted}", engine=row.engine, wanted=task.spec.work.engine))
        if row.split:
            raise UsageError(_("the layers of the first and the last stage are not knobs; see train.settings"))
        known = {knob: value for knob, value in row.knobs.items() if knob in knobs}
        values = {knob: value for knob, value in known.items() if value is not None or knobs[knob].neutral is None}
        for knob, value in values.items():
            allowed_values = (*knobs[knob].values, knobs[knob].neutral, None)
            if isinstance(value, int) and value < (knobs[knob].neutral is not None) and value not in allowed_values:
                raise UsageError(_("{knob} = {value} is not a size", knob=knob, value=value))
        try:
            columns = candidate_columns(self.problem.platform, values)
        except SpecError as error:
            raise UsageError(str(error)) from None
        if broken := broken_rules_of(self.problem, columns):
            raise UsageError(_("illegal: {rule}", rule=broken[0]))
        candidate = as_candidate(space.axes, canonical(columns, self.problem.legality.merges))
        if space.find(candidate) is None:
            raise UsageError(_("not in the space of the spec"))
        if candidate in self.lines:
            raise UsageError(_("the same candidate as line {number}", number=self.lines[candidate]))
        return candidate

    def _trial(self, row: HistoryRow, candidate: Candidate) -> Trial:
        task = self.problem.platform.task
        row_number = self.problem.space.find(candidate)
        assert row_number is not None
        trial = Trial(
            number=-1,
            candidate=candidate,
            role=self.role,
            state=TrialState.FAILED,
            predicted=record(task, self.problem.predictions.row(row_number)),
            duration_s=row.elapsed_s,
            source=self.source,
            reason=row.error,
        )
        if row.out_of_memory:
            return replace(trial, state=TrialState.OUT_OF_MEMORY, reason=row.error or f"{self.title}: OOM")
        serves, cut = isinstance(task.spec.work, ServeSpec), row.cut or row.elapsed_s >= self.limit_s
        measurement = _serving_measurement(task, row) if serves else _training_measurement(task, row, cut)
        if measurement is None:
            return replace(trial, reason=row.error or "it has no figure of the objective")
        row_figures = tuple(row.figures.values())
        earlier = self.lines_of_figures.setdefault(row_figures, row.line) if row_figures else row.line
        # After a failed task, the recorder of the other tuner repeats the figures of the previous task.
        if earlier != row.line:
            return replace(trial, reason=f"repeats the figures of line {earlier}, as {self.title} does after a failure")
        return replace(trial, state=TrialState.MEASURED, measurement=measurement)


def _training_measurement(task: Task, row: HistoryRow, cut: bool) -> Measurement | None:
    if row.step_s is None:
        return None
    train = task.spec.train
    return Measurement(
        step_times_s=(row.step_s,),
        step_time_s=row.step_s,
        spread_s=0.0,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / row.step_s / task.cluster.devices,
        peak_reserved_bytes=row.reserved_bytes,
        partial=cut,
    )


def _serving_measurement(task: Task, row: HistoryRow) -> Measurement | None:
    """Return the measurement of a server's row, or None if the row has no figure of the objective.

    Output tokens are derived from all tokens if all prompts of the load have the same length.
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
    broken = tuple(
        f"{each} is {figures[each]:.4g} s, over its limit" if each in figures else f"{each} is not measured"
        for each, limit in task.spec.limits.items()
        if figures.get(each, np.inf) > limit
    )
    return Measurement(
        step_times_s=(step,),
        step_time_s=step,
        spread_s=0.0,
        tokens_per_second_per_device=(tokens or 0.0) / devices,
        figures=figures,
        broken=broken,
    )


def _plausibility_warning(trials: list[Trial]) -> list[str]:
    """Return a warning if all measured times are far from the predictions."""
    ratios = [ratio for trial in trials if (ratio := measured_to_predicted(trial, "predicted"))]
    median_ratio = float(np.median(ratios)) if ratios else 1.0
    if 1.0 / MAX_FACTOR < median_ratio < MAX_FACTOR:
        return []
    return [_("measured steps are {ratio:.3g} times the predicted ones: check units and job", ratio=median_ratio)]


def read_tree(
    directory: Path, name: str, overrides: Sequence[str] = (), *, importer: str | None = None
) -> ImportedSpec:
    """Read the configuration `name` in `directory` with an installed importer. Raises SpecError, UsageError.

    `overrides` have the form a.b=c. `importer` is needed only if several importers are installed.
    """
    return plugins.importer(importer).read_tree(directory, name, overrides, lambda: plugins.load_plugins(()).chips())


def check_tree(found: ImportedSpec) -> None:
    """Raise SpecError if an imported spec is invalid. It names the keys of the other tuner.

    The model may be missing.
    """
    try:
        validate_engines(found.data, file=Path(found.file), base=Path())
    except SpecError as error:
        problems = [each for each in error.problems if each.key != "model" or not isinstance(each.value, str)]
        if problems:
            raise found.translate_error(SpecErrors(problems)) from None
