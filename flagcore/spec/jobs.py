"""Reads job records. Each describes one candidate on one cluster.

Unknown keys are allowed, because they describe the source of a record.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from importlib import import_module
from typing import Annotated, Any, BinaryIO, ClassVar

from pydantic import ConfigDict, Field, create_model

from flagcore.domain.knob import Knob
from flagcore.domain.spec import AUTO, JobRecord, Precision, TrainSpec
from flagcore.domain.units import Devices, Rate, Text, Word
from flagcore.errors import SpecError
from flagcore.i18n import closest
from flagcore.spec.clusters import NodeDevices, check_devices
from flagcore.spec.knobs import (
    Engines,
    candidate_of,
    candidate_section,
    kinds_of,
    knobs_of,
    settings_of,
    settings_section,
)
from flagcore.spec.models import ModelInput
from flagcore.spec.plain_data import MAX_VALUES, load_json, plain, spec_error
from flagcore.spec.schema import TrainJob, with_depths
from flagcore.spec.validate import Context, Section, checked, rule


class _Cluster(Section):
    chip: Text
    devices: Devices | None = None
    devices_per_node: NodeDevices
    nodes: Devices | None = None
    cpus_per_node: Devices | None = None
    nic_bytes_per_second: Rate | None = None
    interconnect: Any = None
    notes: Any = None
    source: Any = None


NETWORK = re.compile(r"(?:inter-node|IB|RoCE) (?:(\d+) ?x ?)?([\d.]+) ?(Gbps|Gb/s|GB/s)")
"""The rate of the network of a whole node in `interconnect`, such as "inter-node 800 Gbps" or "IB 8x50GB/s"."""


def _with_devices(cluster: _Cluster, _context: Context) -> _Cluster:
    """Return the cluster with its network's rate, if `interconnect` names one, and its number of devices, derived from
    its nodes if it is missing. Raises SpecError."""
    if cluster.chip == AUTO:
        raise spec_error("chip", "must name a chip", value=AUTO, fix="`flag plugins chips` lists them")
    per_node, nodes, devices = cluster.devices_per_node, cluster.nodes, cluster.devices
    if cluster.nic_bytes_per_second is None and (found := NETWORK.search(str(cluster.interconnect))):
        rate = int(found[1] or 1) * float(found[2]) * (1e9 if found[3] == "GB/s" else 1e9 / 8)
        cluster = cluster.model_copy(update={"nic_bytes_per_second": rate / per_node})
    if devices is None:
        if nodes is None:
            raise spec_error("devices", "is missing", fix="give the number of devices in all nodes")
        check_devices(nodes, per_node, ())
        return cluster.model_copy(update={"devices": nodes * per_node})
    if nodes not in (None, expected := -(-devices // per_node)):
        problem = f"must be {expected}: cluster.devices = {devices} at devices_per_node = {per_node}"
        raise spec_error("nodes", problem, value=nodes, fix="leave it out, or change the others")
    return cluster


class _Train(TrainJob):
    precision: Precision
    engine_version: Word | None = None
    settings: Any = None
    notes: Any = None
    source: Any = None


JOB_KEYS = (*TrainJob.model_fields, "engine_version")


class AnyRecord(Section):
    """The keys of records of all kinds. `has_default_engine`: whether a record may name no engine."""

    has_default_engine: ClassVar[bool] = False
    model_config = ConfigDict(extra="ignore")

    id: str
    kind: str
    model: ModelInput
    cluster: Annotated[_Cluster, rule(_with_devices)]


class Record(AnyRecord):
    """A training record."""

    has_default_engine = True
    train: _Train
    candidate: Any
    rank: Annotated[int, Field(ge=0, le=999_999)] | None = None


@lru_cache(maxsize=64)
def _record_of(knobs: tuple[Knob, ...]) -> type[Record]:
    """Return the pydantic model of a training record for an engine with these knobs. Settings are accepted in `train`,
    in `train.settings` and in `candidate`."""
    settings = settings_section(knobs)
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in settings.model_fields.items()}
    train = create_model("_Train", __base__=_Train, **fields, settings=(settings, settings.model_construct()))
    return create_model("_Record", __base__=Record, train=(train, ...), candidate=(candidate_section(knobs), ...))


def read_job(line: Mapping[str, object], engines: Engines) -> JobRecord:
    """Convert a record to a job. Raises SpecError. A relative path of a model is relative to the working directory."""
    if not isinstance(line, Mapping):
        raise spec_error("job", f"is of type {type(line).__name__}", fix="write one JSON object per line")
    kind: Any = line.get("kind")
    kinds = kinds_of(engines)
    if not isinstance(kind, str) or kind not in kinds:
        names = " or ".join(kinds)
        problem = "is missing" if kind is None else f"must be {names}"
        raise spec_error("kind", problem, value=kind, fix=f"write {names}")
    reader = import_module(kinds[kind].records)
    record_type: type[AnyRecord] = reader.Record
    data = plain({key: line[key] for key in record_type.model_fields if key in line})
    section = data.get(kind) if isinstance(data.get(kind), dict) else {}
    if record_type.has_default_engine and section is data.get(kind) and "engine" not in section:
        default = next((name for name, engine in engines.items() if engine.kind == kind), "")
        section = data[kind] = {"engine": default, **section}
    engine = section.get("engine")
    knobs = knobs_of(engine, engines, f"{kind}.engine", kind=kind) if isinstance(engine, str) else ()
    record, fields = reader.read_record(line, data, section, knobs)
    model, fields["work"] = with_depths(record.model, fields["work"], data["model"], engines.get(str(engine)))
    cluster = {"chip", "devices", "devices_per_node", "nic_bytes_per_second", "cpus_per_node"}
    return JobRecord(id=record.id, model=model, **record.cluster.model_dump(include=cluster), **fields)


ReadRecord = tuple[AnyRecord, dict[str, Any]]
"""A validated record, and the fields of its `JobRecord` that depend on the kind of job."""


def read_record(
    line: Mapping[str, object], data: dict[str, Any], _section: Mapping[str, Any], knobs: tuple[Knob, ...]
) -> ReadRecord:
    """Return the validated training record of a line, and the fields of its `JobRecord`. Raises SpecError."""
    sections = {"settings": TrainSpec.kind, **dict.fromkeys((knob.name for knob in knobs), "candidate")}
    reject_misplaced_keys(line, Record, sections)
    record = checked(_record_of(knobs), data)
    devices = record.cluster.devices or 0
    if record.rank is not None and record.rank >= devices:
        problem = f"must be below cluster.devices = {devices}"
        raise spec_error("rank", problem, value=record.rank, fix=f"use 0 to {devices - 1}")
    train, candidate, at = record.train, candidate_of(record.candidate, knobs, settings=False), "train.settings."
    settings = settings_of(train, knobs, at=at) | settings_of(train.settings, knobs, at=at)
    settings |= settings_of(record.candidate, knobs, exclude=candidate, at=at)
    return record, {
        "work": TrainSpec(**{name: getattr(train, name) for name in JOB_KEYS}, settings=settings),
        "candidate": candidate,
        "rank": record.rank,
        "notes": train.notes if isinstance(train.notes, str) else "",
    }


def reject_misplaced_keys(line: Mapping[str, object], record: type[AnyRecord], sections: Mapping[str, str]) -> None:
    """Raise SpecError for a misspelled or misplaced key of a record. Other unknown keys are allowed. `sections`: for
    each key that may be misplaced, the section to which it belongs."""
    known_keys = list(record.model_fields)
    for key in line:
        if key in known_keys or not isinstance(key, str):
            continue
        if key in sections:
            raise spec_error((key,), "is not a known key", value=line[key], fix=f"it belongs under {sections[key]}")
        if close := closest(key[:64], [name for name in known_keys if name not in line], cutoff=0.7):
            raise spec_error((key,), "is not a known key", value=line[key], fix=f"did you mean {close}?")


Line = Mapping[str, Any] | SpecError
MAX_LINE = 16 << 20


def read_job_lines(stream: BinaryIO, *, file: str) -> Iterator[Line]:
    """Yield the record in each line of a job file, or an error that names `file` and the line. Skips empty lines."""
    blank, lines = 0, iter(partial(stream.readline, MAX_LINE + 1), b"")
    for number, line in enumerate(lines, start=1):
        blank = 0 if line.strip() else blank + 1
        if len(line) > MAX_LINE or blank > MAX_VALUES:
            raise spec_error(f"{file}: line {number}", "has no end", fix="write one JSON object per line")
        if not blank:
            yield _record(line, f"{file}: line {number}")


def _record(line: bytes, place: str) -> Line:
    """Return the JSON object in one line of a job file, or an error that names `place` if the line is invalid."""
    fix = "write one JSON object per line"
    try:
        record = load_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return spec_error(place, f"is not UTF-8 text (byte {error.start})", fix=fix)
    except ValueError as error:
        return spec_error(place, str(error), fix=fix)
    if not isinstance(record, dict):
        kind = "a list" if isinstance(record, list) else "a single value"
        return spec_error(place, f"must be a JSON object, not {kind}", fix=fix)
    if not isinstance(record.get("id"), str):
        return spec_error(place, "id must be a string", fix="give each record a unique id")
    return record
