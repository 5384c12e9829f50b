"""Job records: one training candidate on one cluster. Unknown fields are tolerated where a record tells its source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from flagcore.domain.job import Job
from flagcore.domain.spec import TrainSpec
from flagcore.spec.knobs import JobKnobs, candidate_of
from flagcore.spec.limits import Devices, ModelPath, Precision, Size, Text
from flagcore.spec.models import model_from, model_of_shape
from flagcore.spec.plain import plain, spec_error
from flagcore.spec.schema import Shape
from flagcore.spec.settings import Settings, settings_of
from flagcore.spec.validate import Section, checked


class _Tolerant(Section):
    model_config = ConfigDict(extra="ignore")


class _Cluster(_Tolerant):
    chip: Text
    devices: Devices
    devices_per_node: Devices


class _Train(Settings):  # type: ignore[valid-type, misc]
    model_config = ConfigDict(extra="ignore")

    seq_length: Size
    global_batch_size: Size
    precision: Precision
    attention: Literal["flash", "unfused"] = "flash"
    implementation: Literal["local", "transformer_engine"] | None = None
    settings: Settings = Settings()  # type: ignore[valid-type]
    notes: Any = None


class _Record(_Tolerant):
    id: str
    kind: Literal["train"]
    model: ModelPath | Shape
    cluster: _Cluster
    train: _Train
    candidate: JobKnobs  # type: ignore[valid-type]
    rank: Annotated[int, Field(ge=0, le=999_999)] | None = None


def job_from(line: Mapping[str, object]) -> Job:
    """Return one record as a job. A model's relative path starts at the working directory. Raises SpecError."""
    if not isinstance(line, Mapping):
        raise spec_error("job", f"is of type {type(line).__name__}", fix="write one JSON object a line")
    data = plain({key: line[key] for key in _Record.model_fields if key in line})
    if data.get("kind") == "serve":
        raise spec_error("kind", "is not supported: serving comes in a later version", value="serve", fix="use train")
    record = checked(_Record, data)
    if record.rank is not None and record.rank >= record.cluster.devices:
        problem = f"must be below cluster.devices = {record.cluster.devices}"
        raise spec_error("rank", problem, value=record.rank, fix=f"use 0 to {record.cluster.devices - 1}")
    model, train, candidate = record.model, record.train, candidate_of(record.candidate)
    given = settings_of(train) | settings_of(train.settings) | settings_of(record.candidate, but=candidate)
    return Job(
        id=record.id,
        kind=record.kind,
        model=model_from(model, base=Path()) if isinstance(model, str) else model_of_shape(model),
        chip=record.cluster.chip,
        devices=record.cluster.devices,
        devices_per_node=record.cluster.devices_per_node,
        train=TrainSpec(
            engine="megatron",
            seq_length=train.seq_length,
            global_batch_size=train.global_batch_size,
            precision=train.precision,
            attention=train.attention,
            implementation=train.implementation,
            settings=given,
        ),
        candidate=candidate,
        rank=record.rank,
        notes=train.notes if isinstance(train.notes, str) else "",
    )
