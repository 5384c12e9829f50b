"""Reads the configuration of another tool as a spec, and adds the trials of another tuner to a run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from flagcore import plugins
from flagcore.api.candidate_parser import legal_candidate
from flagcore.api.inputs import RUNS, LoadedSpec, SpecLike, check_spec, fixed_task, open_spec, spec_data, write_spec
from flagcore.contracts import HistoryReader, ImportedSpec, Problem
from flagcore.domain.knob import Knobs
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.trial import Role, Trial, checked
from flagcore.errors import RunError, SpecError, SpecErrors, UsageError
from flagcore.i18n import N_, _
from flagcore.spec.convert import engines_of
from flagcore.tuner.experience import Experience
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.run_folder import RunDirectory
from flagcore.tuner.stages.predict import with_figures


def read_tree(
    directory: Path, name: str, overrides: Sequence[str] = (), *, importer: str | None = None
) -> ImportedSpec:
    """Read the configuration `name` in `directory` with an installed importer. Raises SpecError, UsageError.

    `overrides` have the form a.b=c. `importer` is needed only if several importers are installed.
    """
    return plugins.importer(importer).read_tree(directory, name, overrides, lambda: plugins.load_plugins(()).chips())


def check_imported(found: ImportedSpec) -> None:
    """Raise SpecError, which names keys of the file, if an imported spec is invalid. The model may be missing."""
    try:
        check_spec(LoadedSpec(found.file, found.data), base=Path())
    except SpecError as error:
        problems = [each for each in error.problems if each.key != "model" or not isinstance(each.value, str)]
        if problems:
            raise found.translate_error(SpecErrors(problems)) from None


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
    if len(engines_of(data, plugins.kinds())) > 1:
        raise UsageError(_("{file} names several engines: use a spec with the tuned engine only", file=name))
    tool = plugins.importer(importer)
    if not isinstance(tool, HistoryReader):
        raise UsageError(_("{tool} does not support the import of a history", tool=tool.title))
    problem = open_spec(spec, None, without).problem
    found, notes = tool.read_history(path, problem.task, problem.space.axes, partial(_history_candidate, problem))
    if not found:
        reasons = "; ".join(notes[:5]) or _("it has none")
        raise UsageError(_("no row of {file} can be imported: {reasons}", file=path, reasons=reasons))
    role, source = Role.SEARCH if same_machine else Role.IMPORTED, str(path.resolve())
    rows = [problem.predictions.row(problem.row_of(each.candidate)) for each in found]
    predicted = [with_figures(problem.task, each) for each in rows]
    read = [replace(each, role=role, source=source, predicted=p) for each, p in zip(found, predicted, strict=True)]
    trials = [checked(each) for each in read]
    folder = Path(run_dir) if run_dir else RUNS / name.stem
    saved_trials = _save(RunDirectory(folder), problem, data, name.parent, trials, experience=not same_machine)
    notes = (*notes, *_plausibility_warning(trials))
    return ImportedTrials(run_dir=folder, trials=saved_trials, notes=notes, knobs=problem.knobs)


def _history_candidate(problem: Problem, given: Mapping[str, KnobValue]) -> Candidate:
    """Return the candidate with these values of knobs. Raises UsageError if it is not in the space."""
    axes = {axis.knob: axis for axis in problem.space.axes}
    values = {knob: value for knob, value in given.items() if value is not None or axes[knob].neutral is None}
    for knob, value in values.items():
        allowed_values = (*axes[knob].values, axes[knob].neutral, None)
        if isinstance(value, int) and value < (axes[knob].neutral is not None) and value not in allowed_values:
            raise UsageError(_("{knob} = {value} is not a valid size", knob=knob, value=value))
    try:
        candidate = legal_candidate(problem, candidate_columns(problem.platform, values))
    except SpecError as error:
        raise UsageError(str(error)) from None
    if problem.space.find(candidate) is None:
        raise UsageError(_("not in the space of the spec"))
    return candidate


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
    from flagcore.tuner.store import OptunaStore  # importing optuna is slow

    directory.open()
    try:
        identity = directory.identity()
        url = identity["fixed"].get("storage") if identity else None
        run = directory.claim(fixed_task(data, problem), {"baseline": problem.baseline.as_dict(), "storage": url})
        objective = problem.platform.task.spec.objective
        store = OptunaStore(directory.path, problem.space.choices, run=run, objective=objective, url=url)
        if any(trial.source == trials[0].source for trial in store.trials()):
            text = N_("{folder} already contains the trials of {file}: use another --run-dir")
            raise RunError(_(text, folder=directory.path, file=trials[0].source))
        write_spec(directory.path, data, base)
        saved_trials = tuple(store.add(trial) for trial in trials)
        if experience:
            Experience.of_user().save(f"{run}-imported", problem.platform, saved_trials)
    finally:
        directory.close()
    return saved_trials


def _plausibility_warning(trials: list[Trial]) -> list[str]:
    """Return a warning if all measured times are far from the predictions."""
    ratios = [ratio for trial in trials if (ratio := trial.measured_over(trial.predicted))]
    median_ratio = float(np.median(ratios)) if ratios else 1.0
    if 1.0 / MAX_FACTOR < median_ratio < MAX_FACTOR:
        return []
    text = N_("the measured step times are {ratio:.3g} times the predicted ones: check the units and the job")
    return [_(text, ratio=median_ratio)]
