"""The job of the trial program: `serve.json`, written by flagcore and read by the program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState

SERVE = "serve.json"
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading foreign JSON may raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One server. `argv` has the contract's PORT where the port belongs; `cores` pins it, empty: it may use all.

    `asked` are the knob values that must be read back; None: the engine chooses.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    asked: Mapping[str, KnobValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One candidate to be served and loaded.

    `engine` is the place of its record, as module:attribute. All `loads` run `repeats` times in one launch. `slo`
    bounds the figures of good requests. `client` is the command of another client, which writes `report`.
    """

    engine: str
    instances: tuple[Instance, ...]
    loads: tuple[Load, ...]
    vocab_size: int
    timeout_s: float
    repeats: int = 1
    slo: Mapping[str, float] = field(default_factory=dict)
    patterns: tuple[FailurePattern, ...] = ()
    directory: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    client: tuple[str, ...] | None = None
    report: str = ""


def as_text(job: Job) -> str:
    """Return a job as JSON."""
    data = asdict(job) | {
        "loads": [plain_load(load) for load in job.loads],
        "patterns": [{**asdict(pattern), "state": pattern.state.value} for pattern in job.patterns],
    }
    return json.dumps(data, indent=1)


def read_job(folder: Path) -> Job:
    """Return the job in `folder`. Raises ValueError with what is wrong."""
    try:
        data: dict[str, Any] = json.loads((folder / SERVE).read_text(encoding="utf-8"))
        return Job(
            **{
                **data,
                "instances": tuple(
                    Instance(**{**each, "argv": tuple(each["argv"]), "cores": tuple(each["cores"])})
                    for each in data["instances"]
                ),
                "loads": tuple(load_of(load) for load in data["loads"]),
                "client": data.get("client") and tuple(data["client"]),
                "patterns": tuple(
                    FailurePattern(**{**each, "state": TrialState(each["state"])}) for each in data["patterns"]
                ),
            }
        )
    except OSError as error:
        raise ValueError(f"{folder / SERVE} cannot be read: {error.strerror or error}") from None
    except MALFORMED as error:
        raise ValueError(f"{folder / SERVE} is invalid ({type(error).__name__}: {error})") from None


def load_of(data: Mapping[str, Any]) -> Load:
    """Return a load point from plain data. Raises TypeError and ValueError."""
    rate = data.get("request_rate")
    return Load(**{**data, "request_rate": None if rate is None else float(rate)})


def plain_load(load: Load) -> dict[str, Any]:
    """Return a load point as JSON can hold it: an endless rate is the word inf."""
    rate = load.request_rate
    return {**asdict(load), "request_rate": "inf" if rate is not None and math.isinf(rate) else rate}
