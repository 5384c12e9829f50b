"""Creates specs from a few values or from the configuration of another tool, and adds its trials to a run."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.candidate_parser import legal_candidate
from flagcore.api.inputs import LoadedSpec, check_chips, check_spec, fixed_task, write_spec
from flagcore.contracts import ImportedSpec, Problem
from flagcore.domain.chip import USUAL_DEVICES
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import ImportNote
from flagcore.domain.trial import Trial
from flagcore.errors import RunError, SpecError, SpecErrors, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.script import job_name
from flagcore.spec.clusters import ClusterSection
from flagcore.spec.models import absolute_model, model_from
from flagcore.spec.schema import CommonSection
from flagcore.spec.validate import Section, texts_of
from flagcore.tuner.experience import Experience
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.run_folder import RunDirectory


def _documents_of(engine: str) -> Any:
    """Return the module that reads specs for an engine. Raises SpecError."""
    return import_module(plugins.kinds()[plugins.find_engine(engine).kind].documents)


def defaults_of(engine: str) -> Mapping[str, Any]:
    """Return the keys that a new spec of an engine needs or should have, each with its default. Raises SpecError."""
    documents = _documents_of(engine)
    return {**documents.DEFAULTS, **getattr(documents, "PROPOSED", {})}


def new_spec(engine: str, model: str, cluster: Mapping[str, Any], values: Mapping[str, Any]) -> ImportedSpec:
    """Return a spec for a model (a path or a public name). `values` has the keys of `defaults_of`. Raises SpecError."""
    data = _data_of(engine, model, cluster, values)
    check_spec(LoadedSpec(job_name(Path(model).name), data))
    check_chips(cluster)
    sections = {"": CommonSection, "cluster": ClusterSection, **_documents_of(engine).PARTS}
    return ImportedSpec(data=data, notes=tuple(_comments(data, sections)))


def _data_of(engine: str, model: str, cluster: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    model_from(model, base=Path())
    data: dict[str, Any] = {"model": absolute_model(model, Path()), "cluster": dict(cluster)}
    kind = plugins.find_engine(engine).kind
    *_section, inner = list(_documents_of(engine).PARTS)[-1].split(".")
    data[kind] = {"engine": engine, **(values if inner == kind else {inner: dict(values)})}
    data["auto_tuner"] = {"control": {"max_trials": 20, "max_time": 3600}}
    return data


def spec_of_model(
    model: str,
    *,
    engine: str | None = None,
    chip: str | None = None,
    nodes: int | None = None,
    devices: int | None = None,
) -> LoadedSpec:
    """Return a spec for a model without a file, with its name and the defaults of a new spec. Raises SpecError.

    The precision of training is `auto`. `engine`: None means the default for plans. `chip`: None means that of this
    machine. `devices`: the number per node; None means all. A kind of jobs may have other defaults `for_devices`.
    """
    kinds = plugins.kinds()  # each is loaded on first use: the last kinds are those of other distributions
    usual = (pair for kind in reversed([*kinds]) for pair in kinds[kind].plans_with)
    engine = engine or next((name for part, name in usual if part in model.lower()), "")
    cluster: dict[str, Any] = {"nodes": nodes or 1}
    cluster |= {key: value for key, value in (("chip", chip), ("devices_per_node", devices)) if value is not None}
    known = plugins.load_plugins(()).find_chip(chip) if chip and devices is None else None
    own_hosts = known.devices_per_node if known else USUAL_DEVICES if chip or nodes else 1
    count = cluster["nodes"] * (devices or own_hosts)
    documents = _documents_of(engine)
    values = documents.for_devices(count) if hasattr(documents, "for_devices") else documents.DEFAULTS
    return LoadedSpec(job_name(Path(model).name), _data_of(engine, model, cluster, values))


def _comments(data: Mapping[str, Any], sections: Mapping[str, type[Section]]) -> Iterator[ImportNote]:
    """Yield a note for each key of a spec: the description of the key in the schema."""
    for section, schema in sections.items():
        content: Any = data
        for part in filter(None, section.split(".")):
            content = content[part]
        texts = texts_of(schema)
        yield from (ImportNote(key, texts[key], f"{section}.{key}".lstrip(".")) for key in content if key in texts)


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
