"""Reads job records of reinforcement learning."""

from collections.abc import Mapping
from typing import Annotated, Any

from flagcore.domain.knob import Knob
from flagcore.domain.units import Word
from flagcore.spec.jobs import AnyRecord, ReadRecord, reject_misplaced_keys
from flagcore.spec.knobs import candidate_of, candidate_section
from flagcore.spec.validate import Context, checked, rule
from flagcore_rl.documents import RlJob, work_of
from flagcore_rl.job import RlSpec


class _Rl(RlJob):
    engine_version: Word | None = None
    notes: Any = None
    source: Any = None


def _rl_of(job: _Rl, _context: Context) -> RlSpec:
    return work_of(job, engine_version=job.engine_version)


class Record(AnyRecord):
    """A record of reinforcement learning."""

    rl: Annotated[_Rl, rule(_rl_of)]
    candidate: dict[str, Any]


def read_record(
    line: Mapping[str, object], data: dict[str, Any], _section: Mapping[str, Any], knobs: tuple[Knob, ...]
) -> ReadRecord:
    """Return the validated record of a line, and the fields of its `JobRecord`. Raises SpecError."""
    reject_misplaced_keys(line, Record, dict.fromkeys((knob.name for knob in knobs), "candidate"))
    record = checked(Record, data)
    section = candidate_section(knobs)
    candidate = candidate_of(checked(section, record.candidate), knobs, settings=False)
    return record, {"work": record.rl, "candidate": candidate}
