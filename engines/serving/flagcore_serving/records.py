"""Reads job records of serving. Each describes one candidate under one load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from flagcore.domain.knob import Knob
from flagcore.domain.units import Fraction, Text, Word
from flagcore.spec.jobs import AnyRecord, ReadRecord, reject_misplaced_keys
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import Context, Section, checked, rule
from flagcore_serving.documents import KnobInput, Scalar
from flagcore_serving.job import Load, NoTokens, ServePrecision, ServeSpec, Tokens
from flagcore_serving.profile import Clients, Distribution, PerSecond, Requests

CHAT_DATASETS = ("ShareGPT",)
"""Values of `dataset` with lengths of chats. The lengths in the record are the means."""
FILTERED_ANSWER, LONGEST_FILTERED, LONGEST_ANSWERED = 250, 2048, 4096
"""vLLM's client leaves out chats of more than 2,048 tokens (`benchmarks/datasets.py`). Their answers, and those of all
chats, have about 200 tokens in the mean. If a record has more than the first value, they are the server's own: their
lengths are assumed to be log-normal, the longest with the last value."""


class _Serve(Section):
    engine: Word
    engine_version: Text | Literal[""] | None = None
    precision: ServePrecision
    input_len: Tokens
    output_len: Tokens
    prefix_len: NoTokens = 0
    range_ratio: Fraction = 1.0
    distribution: Distribution = "uniform"
    longest: Tokens | None = None
    concurrency: Clients | None = None
    request_rate: PerSecond | None = None
    num_prompts: Requests | None = None
    engine_args: dict[str, Scalar | list[Scalar]] = Field(default={}, max_length=2000)
    weights: Text | None = None
    notes: Any = None
    source: Any = None


def _serve_of(serve: _Serve, _context: Context) -> ServeSpec:
    """Return the serving job that a record describes. Raises SpecError."""
    rate = serve.request_rate
    if (serve.concurrency is None) == (rate is None):
        fix = "remove one of the two"
        raise spec_error("serve.concurrency and serve.request_rate", "are both given, or both missing", fix=fix)
    if serve.weights is not None and not Path(serve.weights).is_file():
        fix = "give a GGUF file, or leave it out"
        raise spec_error("weights", "is not a file", value=serve.weights, fix=fix)
    same = {"input_len", "output_len", "prefix_len", "range_ratio", "distribution", "longest", "concurrency"}
    same |= {"num_prompts"}
    load = Load(**serve.model_dump(include=same), request_rate=None if rate is None else float(rate))
    return ServeSpec(
        engine=serve.engine,
        loads=(load,),
        precision=serve.precision,
        engine_args=dict(serve.engine_args),
        weights=serve.weights,
        engine_version=serve.engine_version or None,
    )


class Record(AnyRecord):
    """A serving record."""

    serve: Annotated[_Serve, rule(_serve_of)]
    dataset: Any = None
    candidate: dict[str, KnobInput]


def read_record(
    line: Mapping[str, object], data: dict[str, Any], section: Mapping[str, Any], knobs: tuple[Knob, ...]
) -> ReadRecord:
    """Return the validated serving record of a line, and the fields of its `JobRecord`. Raises SpecError."""
    sections = dict.fromkeys((name for knob in knobs for name in knob.names), "candidate")
    absent = _Serve.model_fields.keys() - {"notes", "source"} - set(section)
    reject_misplaced_keys(line, Record, sections | dict.fromkeys(absent, "serve"))
    if section.get("precision") == "fp4":  # sources mean nvfp4, which is the only supported 4-bit format
        data["serve"] = {**section, "precision": "nvfp4"}
    if section and data.get("dataset") in CHAT_DATASETS:
        is_own = isinstance(answer := section.get("output_len"), int) and answer > FILTERED_ANSWER
        longest, lengths = (LONGEST_ANSWERED, "lognormal") if is_own else (LONGEST_FILTERED, "chat")
        data["serve"] = {"longest": longest, **data["serve"], "distribution": lengths}
    record = checked(Record, data)
    candidate = {key: str(value) if isinstance(value, float) else value for key, value in record.candidate.items()}
    notes = source if isinstance(source := line.get("source"), str) else ""
    return record, {"work": record.serve, "candidate": candidate, "notes": notes}
