"""Adds the trials of another tuner to a run."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from flagcore import plugins
from flagcore.api.commands.importing import imported_candidate, save_trials
from flagcore.api.inputs import RUNS, SpecLike, open_spec, spec_data
from flagcore.contracts import HistoryReader
from flagcore.domain.knob import Knobs
from flagcore.domain.trial import Role, Trial, checked
from flagcore.errors import UsageError
from flagcore.i18n import N_, _
from flagcore.tuner.stages.predict import with_figures

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
    tool = plugins.importer(importer)
    if not isinstance(tool, HistoryReader):
        raise UsageError(_("{tool} does not support the import of a history", tool=tool.title))
    problem = open_spec(spec, None, without).problem
    found, notes = tool.read_history(path, problem.task, problem.space.axes, partial(imported_candidate, problem))
    if not found:
        reasons = "; ".join(notes[:5]) or _("it has none")
        raise UsageError(_("no row of {file} can be imported: {reasons}", file=path, reasons=reasons))
    role, source = Role.SEARCH if same_machine else Role.IMPORTED, str(path.resolve())
    rows = [problem.predictions.row(problem.row_of(each.candidate)) for each in found]
    predicted = [with_figures(problem.task, each) for each in rows]
    read = [replace(each, role=role, source=source, predicted=p) for each, p in zip(found, predicted, strict=True)]
    trials = [checked(each) for each in read]
    folder = Path(run_dir) if run_dir else RUNS / name.stem
    saved_trials = save_trials(folder, problem, data, name.parent, trials, experience=not same_machine)
    notes = (*notes, *_plausibility_warning(trials))
    return ImportedTrials(run_dir=folder, trials=saved_trials, notes=notes, knobs=problem.knobs)


def _plausibility_warning(trials: list[Trial]) -> list[str]:
    """Return a warning if all measured times are far from the predictions."""
    ratios = [ratio for trial in trials if (ratio := trial.measured_over(trial.predicted))]
    median_ratio = float(np.median(ratios)) if ratios else 1.0
    if 1.0 / MAX_FACTOR < median_ratio < MAX_FACTOR:
        return []
    text = N_("the measured step times are {ratio:.3g} times the predicted ones: check the units and the job")
    return [_(text, ratio=median_ratio)]
