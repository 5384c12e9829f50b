"""Creates specs from a few values."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.inputs import LoadedSpec, check_chips, check_spec
from flagcore.contracts import ImportedSpec
from flagcore.domain.chip import USUAL_DEVICES
from flagcore.domain.spec import ImportNote
from flagcore.launchers.script import job_name
from flagcore.spec.clusters import ClusterSection
from flagcore.spec.models import absolute_model, model_from
from flagcore.spec.schema import CommonSection
from flagcore.spec.validate import Section, texts_of


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
    count = cluster["nodes"] * (devices or (USUAL_DEVICES if chip or nodes else 1))
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
