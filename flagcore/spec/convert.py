"""Converts a validated document to `flagcore.domain.spec.Spec`, checks rules on several keys, and reads host files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.domain.knob import Knob
from flagcore.domain.objective import CHEAPEST, COST
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import AUTO, ClusterSpec, Control, Spec, TrainSpec
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import N_, _
from flagcore.spec.clusters import cluster_of, environment_of, size_of
from flagcore.spec.data_file import spec_as_data
from flagcore.spec.knobs import Engines, candidate_of, knobs_of, serving_values, settings_of, space_of
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import KeyPath, plain, spec_error
from flagcore.spec.schema import (
    BudgetSection,
    ControlSection,
    Document,
    TrainSection,
    document_of,
)
from flagcore.spec.serve_schema import ServeDocument, serve_document_of
from flagcore.spec.serving import check_answers, engines_of, knobs_of_engine, serve_of
from flagcore.spec.validate import convert_all, overlap, partly_checked

Converters = Mapping[str, tuple[Sequence[KeyPath], Callable[[], object]]]
"""For each field of a spec the keys that must be valid, and the function that returns its value."""

ReadResult = tuple[Document | ServeDocument, Converters, list[SpecError], list[KeyPath]]
"""A document, converters of some fields, its problems, and its invalid keys."""

SPACE, BASELINE, CONTROL = (("auto_tuner", key) for key in ("space", "baseline", "control"))
TRIAL_NODES = (*CONTROL, "trial_nodes")
WEIGHTS = ("serve", "weights")


def read_spec(path: Path, engines: Engines) -> Spec:
    """Read a spec file in YAML, or in JSON if its suffix is `.json`. Raises SpecError.

    Paths in the file are relative to its folder.
    """
    return parse_spec(spec_as_data(path), file=str(path), base=path.parent, engines=engines)


def parse_spec(data: Any, *, file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob] = ()) -> Spec:
    """Convert plain data to a spec. Raises SpecError.

    `file` is the name of the file in errors, `base` the folder of relative paths. Space, baseline and settings are
    validated against the knobs of the engine that the spec names. The values of `plugin_knobs` are validated later,
    when the chip is known.
    """
    data = plain(data, file=file)
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping with the keys model, cluster and train"), value=data, file=file)
    read = _read_serving if "serve" in data else _read_training
    document, converters, problems, invalid = read(data, file, base, engines, plugin_knobs)
    fewer = getattr(document.auto_tuner.control, "trial_nodes", None) is not None
    all_converters: Converters = {
        "model": ((("model",), WEIGHTS), lambda: model_from(_model_source(document, file), base=base, file=file)),
        "cluster": ((("cluster",), TRIAL_NODES), lambda: cluster_of(document.cluster, file, base, fewer)),
        **converters,
        "envs": ((("envs",),), lambda: environment_of(document.envs, ("envs",), file)),
    }
    valid = {
        name: convert
        for name, (required, convert) in all_converters.items()
        if not any(overlap(key, path) for key in required for path in invalid)
    }
    fields = convert_all(valid, problems)
    tuner = document.auto_tuner
    objective = _objective(document, fields["cluster"], file)
    spec = Spec(**fields, objective=objective, strategy=tuner.strategy, launcher=tuner.launcher)
    for nodes in spec.control.trial_nodes:
        if problem := _trial_nodes_problem(spec, nodes):
            fix = _("give a divisor of cluster.nodes, such as {number}", number=_largest_share(spec.cluster.nodes))
            raise spec_error(TRIAL_NODES, problem, value=nodes, fix=fix, file=file)
    return spec


def _trial_nodes_problem(spec: Spec, nodes: int) -> str:
    """Return why trials cannot run on some of the nodes, empty if they can."""
    total_nodes, hosts = spec.cluster.nodes, len(spec.cluster.hosts)
    if spec.cluster.groups:
        return _("needs equal nodes, but there are cluster.groups")
    if total_nodes % nodes:
        return _("must divide cluster.nodes = {nodes}", nodes=total_nodes)
    if hosts and nodes > hosts - spec.cluster.spares:
        return _("is more than the hosts of cluster.hostfile")
    batch = spec.train.global_batch_size
    if batch * nodes % total_nodes:
        return _(
            "is {share} of the nodes, and global_batch_size = {batch} cannot be split in this ratio",
            share=f"1/{total_nodes // nodes}",
            batch=batch,
        )
    return ""


def _largest_share(nodes: int) -> int:
    """Return the largest divisor of a number below it."""
    return next((nodes // each for each in range(2, nodes + 1) if nodes % each == 0), 1)


def _model_source(document: Document | ServeDocument, file: str) -> object:
    """Return the model of a spec, that of the weights if a server has no other. Raises SpecError without any."""
    weights = document.serve.weights if isinstance(document, ServeDocument) else None
    if document.model is None and weights is None:
        fix = _("give a path such as ./Qwen3-8B or a mapping")
        raise spec_error("model", _("is missing"), fix=fix, file=file)
    return weights if document.model is None else document.model


def _read_training(
    data: dict[str, Any], file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob]
) -> ReadResult:
    name = data["train"].get("engine") if isinstance(data.get("train"), dict) else None
    knobs: tuple[Knob, ...] = ()
    document_type, engine_problems = Document, list[SpecError]()
    if isinstance(name, str):
        try:
            knobs = (*knobs_of(name, engines, "train.engine", file), *plugin_knobs)
            document_type = document_of(name, knobs)
        except SpecError as error:
            engine_problems.append(error)
    document, problems, invalid = partly_checked(document_type, data, file=file)
    tuner = document.auto_tuner
    limits = [(*CONTROL, key) for key in ("train_iters", "warmup_iters", "trial_nodes")]
    converters: Converters = {
        "work": ((("train",),), lambda: train_of(document.train, knobs, base)),
        "space": ((SPACE,), lambda: space_of(tuner.space, knobs)),
        "baseline": (
            (BASELINE,),
            lambda: None if tuner.baseline is None else candidate_of(tuner.baseline, knobs, settings=True),
        ),
        "control": (limits, lambda: _control(tuner.control, file)),
    }
    if document_type is Document:
        invalid += [("train", "engine"), SPACE, BASELINE]
    return document, converters, engine_problems + problems, invalid


def _read_serving(
    data: dict[str, Any], file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob]
) -> ReadResult:
    if "train" in data:
        raise spec_error("serve", _("cannot be combined with train"), fix=_("remove one of the two"), file=file)
    document, knobs, problems, invalid = _serve_document(data, file, engines, plugin_knobs)
    names = engines_of(data)
    if len(names) > 1:
        problem = _("lists several engines; this command accepts one")
        fix = _("name one of them; `flag tune` accepts several")
        problems.append(spec_error("serve.engine", problem, value=list(names), fix=fix, file=file))
        invalid.append(("serve", "engine"))
    tuner, engine = document.auto_tuner, next(iter(names), "")

    def values(at: KeyPath) -> dict[str, Any]:
        return serving_values(knobs_of_engine(data["auto_tuner"][at[-1]], engine), knobs[engine], at, file)

    def space() -> dict[str, Any]:
        section = values(SPACE) if SPACE[-1] in data.get("auto_tuner", {}) else {}
        return {name: each if isinstance(each, tuple) or each == AUTO else (each,) for name, each in section.items()}

    def work() -> ServeSpec:
        return serve_of(
            document.serve,
            engine,
            base,
            cards=tuner.cards,
            model=document.model,
            default_space=not (data.get("auto_tuner") or {}).get("space"),
            file=file,
        )

    converters: Converters = {
        "work": ((("serve",), ("model",), ("auto_tuner", "cards")), work),
        "space": ((("serve", "engine"), SPACE), space),
        "baseline": ((("serve", "engine"), BASELINE), lambda: None if tuner.baseline is None else values(BASELINE)),
        "control": ((CONTROL,), lambda: budgets(tuner.control, file)),
    }
    return document, converters, problems, invalid


def check_engines(data: Mapping[str, Any], *, file: str, engines: Engines) -> None:
    """Check a spec with several serving engines. Raises SpecError with all invalid keys, if the engines are known."""
    _document, knobs, problems, _invalid = _serve_document(plain(data, file=file), file, engines, ())
    if problems and len(knobs) == len(engines_of(data)):
        raise join_errors(problems)


def _serve_document(
    data: dict[str, Any], file: str, engines: Engines, plugin_knobs: Sequence[Knob]
) -> tuple[ServeDocument, dict[str, tuple[Knob, ...]], list[SpecError], list[KeyPath]]:
    """Return a document, the knobs of each of its engines, its problems, and its invalid keys."""
    knobs: dict[str, tuple[Knob, ...]] = {}
    engine_problems: list[SpecError] = []
    names = engines_of(data)
    for name in names:
        try:
            knobs[name] = (*plugin_knobs, *knobs_of(name, engines, "serve.engine", file, "serve"))
        except SpecError as error:
            engine_problems.append(error)
    document_type = serve_document_of(tuple(knobs.items())) if names and not engine_problems else ServeDocument
    document, problems, invalid = partly_checked(document_type, data, file=file)
    if engine_problems:
        invalid.append(("serve", "engine"))
    return document, knobs, engine_problems + problems, invalid


def train_of(train: TrainSection, knobs: Sequence[Knob], base: Path) -> TrainSpec:
    """Return the training job of a section. The default directory of the user's command is `base`."""
    fields = train.model_dump(exclude={"command", "directory", "settings"})
    fields["settings"] = settings_of(train.settings, knobs)
    if not train.command:
        return TrainSpec(**fields)
    directory = (base / (train.directory or ".")).resolve()
    return TrainSpec(**fields, command=tuple(train.command), directory=str(directory))


def _objective(document: Document | ServeDocument, cluster: ClusterSpec, file: str) -> str:
    """Return the figure that the search optimizes. Raises SpecError for `cost` without prices, and for the time of
    further tokens of answers of one token.
    """
    name = str(document.auto_tuner.objective)
    if isinstance(document, ServeDocument):
        check_answers(document.serve.profile, (name,), file)
    if name != COST:
        return name
    if any(group.price_per_device_hour is None for group in cluster.groups or (cluster,)):
        key = "cluster.groups[].price_per_device_hour" if cluster.groups else "cluster.price_per_device_hour"
        fix = _("give {key}, or another objective", key=key)
        raise spec_error("auto_tuner.objective", _("needs the price of all devices"), value=name, fix=fix, file=file)
    return CHEAPEST["serve" if isinstance(document, ServeDocument) else "train"]


def _control(control: ControlSection, file: str) -> Control:
    if control.warmup_iters >= control.train_iters:
        key, text = "auto_tuner.control.warmup_iters", N_("must be below {name} = {value}")
        problem = _(text, name="train_iters", value=control.train_iters)
        fix = _("use {number} or fewer", number=control.train_iters - 1)
        raise spec_error(key, problem, value=control.warmup_iters, fix=fix, file=file)
    trial_nodes = control.trial_nodes
    sizes = tuple(trial_nodes) if isinstance(trial_nodes, list) else () if trial_nodes is None else (trial_nodes,)
    if list(sizes) != sorted(set(sizes)):
        problem, fix = _("must be in ascending order"), _("sort it")
        raise spec_error(TRIAL_NODES, problem, value=trial_nodes, fix=fix, file=file)
    return replace(budgets(control, file), trial_nodes=sizes)


def budgets(control: BudgetSection, file: str) -> Control:
    """Convert a section to budgets. Raises SpecError."""
    disk = size_of(control.disk_limit, (*CONTROL, "disk_limit"), file)
    return Control(**{**control.model_dump(), "disk_limit": disk})
