"""Reads spec files as `flagcore.domain.spec.Spec`, and checks rules that concern several sections."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from flagcore.contracts import Engine
from flagcore.domain.knob import Knob
from flagcore.domain.spec import COST, Spec, TrainSpec
from flagcore.domain.work import Work
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import _
from flagcore.spec.knobs import Engines, kinds_of, knobs_of, knobs_of_engine, missing_engine, sections_of
from flagcore.spec.plain_data import plain, spec_error
from flagcore.spec.schema import CommonSection, with_depths, with_fields
from flagcore.spec.validate import Context, Section, located, validated


def parse_spec(data: Any, *, file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob] = ()) -> Spec:
    """Convert plain data to a spec. Raises SpecError.

    Space, baseline and settings are validated against the knobs of the engine that the spec names.

    `file`: the name of the file in errors.
    `base`: the folder of relative paths.
    `plugin_knobs`: knobs of plugins. Their values are validated later, when the chip is known.
    """
    document, problems = _document(data, file, base, engines, plugin_knobs)
    kinds = kinds_of(engines)
    if len(names := engines_of(data, kinds)) > 1:
        problem = _("lists several engines; this command accepts one")
        fix = _("name one of them; `flag estimate` and `flag tune` accept several")
        key = f"{_kind_of(data, kinds)}.engine"
        problems.append(spec_error(key, problem, value=list(names), fix=fix, file=file))
    if document is None or problems:
        raise join_errors(problems)
    try:
        spec = _spec_of(document, kinds)
        model, work = with_depths(spec.model, spec.work, data.get("model"), engines.get(spec.work.engine))
        return replace(spec, model=model, work=work)
    except SpecError as error:
        problem_of_sections = error
    raise located(problem_of_sections, (), file)


def _kind_of(data: object, kinds: Mapping[str, type[Work]]) -> str:
    """Return the first of `kinds` that has a section in a spec's data. Empty if there is none."""
    return next((each for each in kinds if isinstance(data, Mapping) and each in data), "")


def engines_of(data: object, kinds: Mapping[str, type[Work]]) -> tuple[str, ...]:
    """Return the names of the engines in the section of a spec's data that is one of `kinds`, without duplicates.

    Only some kinds can list several. Returns an empty tuple if there is no such section.
    """
    kind = _kind_of(data, kinds)
    section = data.get(kind) if isinstance(data, Mapping) else None
    engine = section.get("engine") if isinstance(section, Mapping) else None
    names = engine if isinstance(engine, list) and kinds[kind].several_engines else [engine]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def select_engine(data: Mapping[str, Any], engine: str, kinds: Mapping[str, type[Work]]) -> dict[str, Any]:
    """Return a spec's data reduced to one of its engines.

    Raises SpecError if there are knobs of an engine that the spec does not name.
    """
    given, engines, kind = data.get("auto_tuner"), engines_of(data, kinds), _kind_of(data, kinds)
    tuner = dict(given) if isinstance(given, Mapping) else {}  # the schema refuses another type
    for key in ("space", "baseline"):
        knobs = tuner.get(key)
        if not isinstance(knobs, Mapping):
            continue
        if other := next((name for name in knobs if isinstance(knobs[name], Mapping) and name not in engines), None):
            problem = f"has knobs of an engine that {kind}.engine does not name"
            fix = f"remove it, or add the engine to {kind}.engine ({', '.join(engines)})"
            raise spec_error(("auto_tuner", key, other), problem, fix=fix)
        tuner[key] = knobs_of_engine(knobs, engine)
    selected = {**data, kind: {**data[kind], "engine": engine}}
    return {**selected, "auto_tuner": tuner} if tuner else selected


def check_engines(data: Mapping[str, Any], *, file: str, base: Path, engines: Engines) -> None:
    """Check a spec with several serving engines. Raises SpecError with all invalid keys.

    If one of the engines is unknown, nothing is raised. The caller then checks the spec for each engine separately.
    """
    _document_or_none, problems = _document(data, file, base, engines, ())
    if problems and all(not problem.key.endswith(".engine") for problem in problems):
        raise join_errors(problems)


def _document(
    data: Any, file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob]
) -> tuple[CommonSection | None, list[SpecError]]:
    """Validate a spec. Return the document, or None if it is invalid, and its problems. The sections of the document
    are already converted to records of `flagcore.domain`."""
    data = plain(data, file=file)
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping with the keys model, cluster and train"), value=data, file=file)
    kinds = kinds_of(engines)
    sections = [each for each in kinds if each in data]
    if len(sections) > 1:
        problem = _("cannot be combined with {key}", key=sections[0])
        raise spec_error(sections[1], problem, fix=_("remove one of the two"), file=file)
    kind = _kind_of(data, kinds) or _missing_kind(data, engines, file)
    knobs, problems = dict[str, tuple[Knob, ...]](), list[SpecError]()
    for name in engines_of(data, kinds):
        try:
            knobs[name] = (*knobs_of(name, engines, f"{kind}.engine", file, kind), *plugin_knobs)
        except SpecError as error:
            problems += [located(each, (), file) for each in error.problems]
    document_type = import_module(kinds[kind].documents).document_for(() if problems else tuple(knobs.items()))
    document_type = with_fields(document_type, **sections_of(engines, data))
    _add_sections(document_type, data)
    document, found = validated(document_type, data, Context(file=file, base=base, data=data))
    return document, problems + found


def _missing_kind(data: Mapping[str, Any], engines: Engines, file: str) -> str:
    """Return the kind of a spec without the section of an installed one. Raises SpecError if it has a section for an
    engine that flagcore could install, because the kind may come with it."""
    for key, section in data.items():
        engine = section.get("engine") if isinstance(section, dict) else None
        for name in engine if isinstance(engine, list) else [engine]:
            if isinstance(name, str) and name not in engines and missing_engine(name, engines):
                knobs_of(name, engines, f"{key}.engine", file, key)
    return TrainSpec.kind


def _add_sections(kind: type[BaseModel], data: dict[str, Any]) -> None:
    """Add an empty section for each missing one, because pydantic does not convert defaults."""
    for name, field in kind.model_fields.items():
        if isinstance(field.default, Section):
            data.setdefault(name, {})
        elif name == "model" and not field.is_required():
            data.setdefault(name, None)
        section = type(field.default) if isinstance(field.default, Section) else field.annotation
        if isinstance(section, type) and issubclass(section, Section) and isinstance(data.get(name), dict):
            _add_sections(section, data[name])


def _spec_of(document: CommonSection, kinds: Mapping[str, type[Work]]) -> Spec:
    """Return the spec for a valid document. Raises SpecError if its sections contradict each other."""
    fields = dict[str, Any](document)
    tuner, kind = dict(fields["auto_tuner"]), next(each for each in kinds if each in fields)
    tuner.pop("cards", None)
    if tuner["objective"] == COST:
        cluster = fields["cluster"]
        if any(group.price_per_device_hour is None for group in cluster.groups or (cluster,)):
            key = "cluster.groups[].price_per_device_hour" if cluster.groups else "cluster.price_per_device_hour"
            fix = _("set {key}, or choose another objective", key=key)
            raise spec_error("auto_tuner.objective", _("needs the price of all devices"), value=COST, fix=fix)
        tuner["objective"] = kinds[kind].cheapest_objective
    spec = Spec(**{name: fields[name] for name in ("model", "cluster", "envs")}, work=fields[kind], **tuner)
    nodes, whole = spec.control.trial_nodes, spec.cluster.nodes
    if nodes and (problem := _trial_nodes_problem(spec, nodes)):
        largest = next((whole // each for each in range(2, whole + 1) if whole % each == 0), 1)
        fix = _("give a divisor of cluster.nodes, such as {number}", number=largest)
        raise spec_error("auto_tuner.control.trial_nodes", problem, value=nodes, fix=fix)
    return spec


def _trial_nodes_problem(spec: Spec, nodes: int) -> str:
    """Return why trials of `spec` cannot run on `nodes` nodes, or an empty string if they can."""
    total_nodes, hosts = spec.cluster.nodes, len(spec.cluster.hosts)
    if spec.cluster.groups:
        return _("requires identical nodes, but cluster.groups is set")
    if total_nodes % nodes:
        return _("must divide cluster.nodes = {nodes}", nodes=total_nodes)
    if hosts and nodes > hosts - spec.cluster.spares:
        return _("is more than the number of hosts in cluster.hostfile")
    batch = spec.work.step_samples
    if batch * nodes % total_nodes:
        return _(
            "is {share} of cluster.nodes, and {share} of global_batch_size = {batch} is not an integer",
            share=f"1/{total_nodes // nodes}",
            batch=batch,
        )
    return ""


def json_schema(engines: Engines) -> dict[str, Any]:
    """Return the JSON Schema that specs for any of `engines` must satisfy, except those whose knobs a spec names."""
    fixed = [(name, each) for name, each in engines.items() if type(each).with_program is Engine.with_program]
    documents = list[Any]()
    kinds = kinds_of(engines)
    for kind in kinds:
        rows = tuple((name, each.knobs) for name, each in fixed if each.kind == kind)
        if not rows:
            continue
        job = kinds[kind]
        several = [rows] if job.several_engines and len(rows) > 1 else []
        documents += [import_module(job.documents).document_for(each) for each in (*((row,) for row in rows), *several)]
    documents = [with_fields(each, **sections_of(engines, ())) for each in documents or [CommonSection]]
    schema = TypeAdapter(reduce(or_, documents)).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "flagcore spec"}
