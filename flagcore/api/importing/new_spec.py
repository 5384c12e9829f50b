"""A new spec with comments, from a few values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.common.inputs import check_chips, validate_engines
from flagcore.api.importing.command import ImportedCommand
from flagcore.contracts import ImportNote
from flagcore.spec.models import model_from
from flagcore.spec.schema import ClusterSection, CommonSection, TrainSection
from flagcore.spec.serve_schema import ProfileSection, ServeSection
from flagcore.spec.validate import Section

TRAINING: Mapping[str, Any] = {"seq_length": 4096, "global_batch_size": 512, "precision": "bf16"}
SERVING: Mapping[str, Any] = {"input_len": 1024, "output_len": 128, "concurrency": 16}
"""The values that a new spec needs, by the kind of its engine, with their defaults."""


def defaults_of(engine: str) -> Mapping[str, Any]:
    """Return the keys that a new spec of an engine needs, with their defaults. Raises SpecError."""
    return TRAINING if plugins.workload(engine).kind == "train" else SERVING


def new_spec(engine: str, model: str, cluster: Mapping[str, Any], values: Mapping[str, Any]) -> ImportedCommand:
    """Return a spec for the model at a path. `values` are those of `defaults_of`. Raises SpecError."""
    path = os.path.abspath(model)
    model_from(path, base=Path())
    data: dict[str, Any] = {"model": path, "cluster": dict(cluster)}
    sections: dict[str, type[Section]] = {"": CommonSection, "cluster": ClusterSection}
    if plugins.workload(engine).kind == "train":
        data["train"] = {"engine": engine, **values}
        sections["train"] = TrainSection
    else:
        data["serve"] = {"engine": engine, "profile": dict(values)}
        sections |= {"serve": ServeSection, "serve.profile": ProfileSection}
    data["auto_tuner"] = {"control": {"max_trials": 20, "max_time": 3600}}
    validate_engines(data, file=Path(), base=Path())
    check_chips(cluster)
    return ImportedCommand(data=data, notes=tuple(_comments(data, sections)))


def _comments(data: Mapping[str, Any], sections: Mapping[str, type[Section]]) -> list[ImportNote]:
    """Return the description of each key in the schema."""
    notes = []
    for section, schema in sections.items():
        content: Any = data
        for part in filter(None, section.split(".")):
            content = content[part]
        for key in content:
            if (field := schema.model_fields.get(key)) is not None and field.description:
                notes.append(ImportNote(key, field.description, f"{section}.{key}".lstrip(".")))
    return notes
