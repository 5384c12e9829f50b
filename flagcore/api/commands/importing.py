"""Reads the configuration of another tool as a spec, and adds the trials of another tuner to a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from flagcore import plugins
from flagcore.api.candidate_parser import legal_candidate
from flagcore.api.inputs import LoadedSpec, check_spec, fixed_task, write_spec
from flagcore.contracts import ImportedSpec, Problem
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.trial import Trial
from flagcore.errors import RunError, SpecError, SpecErrors, UsageError
from flagcore.i18n import N_, _
from flagcore.tuner.experience import Experience
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.run_folder import RunDirectory


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


def imported_candidate(problem: Problem, given: Mapping[str, KnobValue]) -> Candidate:
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


def save_trials(
    folder: Path, problem: Problem, data: Mapping[str, object], base: Path, trials: list[Trial], *, experience: bool
) -> tuple[Trial, ...]:
    """Write the trials to the folder of a run and, with `experience`, their measurements for use by other runs."""
    from flagcore.tuner.store import OptunaStore  # importing optuna is slow

    directory = RunDirectory(folder)
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
