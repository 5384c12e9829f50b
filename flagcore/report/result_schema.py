"""Checks a result.json, which users may have edited, before it is used."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from flagcore.domain.space import KnobValue
from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore.spec.plain_data import KeyPath, load_json, spec_error
from flagcore.spec.validate import Section, checked, located

MAX_VALUE = 2.0**500
"""The maximum value of a number, other than infinity."""
Count: TypeAlias = Annotated[int, Field(ge=0, le=2**63)]
Data: TypeAlias = dict[str, Any]
EMPTY: Any = Field(default_factory=dict)
EMPTY_LIST: Any = Field(default_factory=list)
Numbers: TypeAlias = Annotated[list[float], EMPTY_LIST]
Texts: TypeAlias = Annotated[list[str], EMPTY_LIST]
Records: TypeAlias = Annotated[list[Data], EMPTY_LIST]
State: TypeAlias = Literal[
    "predicted", "measured", "stopped", "out_of_memory", "invalid", "failed", "timed_out", "interrupted"
]
Fidelity: TypeAlias = Literal["estimate", "probe", "run"]


class _Object(Section):
    """An object of which only the keys that flagcore reads are checked."""

    model_config = ConfigDict(extra="ignore")


class _Steps(_Object):
    median: Annotated[float, Field(gt=0.0, le=MAX_VALUE)]
    spread: float = 0.0
    steps: Numbers


class _Measured(_Object):
    step_time_s: _Steps
    tokens_per_second_per_device: float
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    device_used_gib: float | None = None
    losses: Annotated[list[float | None], EMPTY_LIST]
    effective: Annotated[Data, EMPTY]
    versions: Annotated[Data, EMPTY]
    telemetry: Annotated[Data, EMPTY]
    devices: Records
    slow_devices: Texts
    figures: Annotated[Data, EMPTY]
    points: Records
    broken: Texts


class _Trial(_Object):
    number: Annotated[int, Field(ge=0, le=99_999)]
    candidate: dict[str, KnobValue]
    role: Literal["baseline", "interference", "search", "repeat", "imported"] = "search"
    state: State = "measured"
    fidelity: Fidelity = "run"
    reason: str | None = None
    log: str | None = None
    source: str | None = None
    duration_s: float = 0.0
    predicted: Data | None = None
    measured: _Measured | None = None
    finished_steps_s: Numbers


Trials: TypeAlias = Annotated[list[_Trial], EMPTY_LIST]


class _Counts(_Object):
    combinations: Count
    illegal: dict[str, Count]
    merged: Count
    candidates: Count
    does_not_fit: Count
    pruned: dict[str, Count]
    measured: Count
    stopped: Count
    failed: Count
    untried: Count


class _Objective(_Object):
    name: str


class _Result(_Object):
    schema_version: Literal[1]
    chip: str
    devices: Annotated[int, Field(ge=1, le=2**31)]
    objective: _Objective
    fidelity: Fidelity
    counts: _Counts
    stopped_because: str | None = None
    baseline: _Trial | None = None
    best: _Trial | None = None
    trials: Trials
    repeats: Trials
    probes: Trials
    speedup: Data | None = None
    noise: Annotated[Data, EMPTY]
    fastest: int | None = None
    limits: Annotated[dict[str, float], EMPTY]
    slow_devices: Annotated[dict[str, list[int]], EMPTY]
    notes: Texts
    note_messages: Annotated[list[Data | None], EMPTY_LIST]
    front: Records
    engine: str = ""
    engines: Annotated[dict[str, Data], EMPTY]


def checked_result(content: bytes) -> dict[str, Any]:
    """Return the data of a result.json. Raises SpecError for the first invalid value, and ValueError if it is no JSON.

    Numbers may be infinite, such as the rate of requests that are sent at once, but not NaN.
    """
    data: dict[str, Any] = load_json(content.decode("utf-8-sig"))
    _check(data, ())
    for path, value in _numbers(data, ()):
        if not (abs(value) <= MAX_VALUE or value == math.inf):
            raise spec_error(path, _("is too large, or is not a number"), value=value)
    for name, each in data.get("engines", {}).items():
        if "error" not in each:
            _check(each, ("engines", name))
    return data


def _check(data: object, path: KeyPath) -> None:
    try:
        checked(_Result, data)
    except SpecError as error:
        raise located(error.problems[0], path, "") from None


def _numbers(data: object, path: KeyPath) -> Iterator[tuple[KeyPath, float]]:
    """Yield the numbers in plain data with their keys."""
    if isinstance(data, (int, float)):
        yield path, data
    elif isinstance(data, (dict, list)):
        for key, each in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(each, (*path, key))
