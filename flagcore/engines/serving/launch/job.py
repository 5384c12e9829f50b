"""The job of the trial program: flagcore writes `serve.json`, and the trial program reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import Load
from flagcore.engines.serving.launch.server import Instance, Router

SERVE = "serve.json"
SHARED_FOLDER = "shared"
"""The folder that instances of a trial share; it is removed after the trial."""


def log_name(number: int, part: int = 0) -> str:
    """Return the name of an instance's log, on its first host or a further one."""
    return f"instance-{number}-host-{part}.log" if part else f"instance-{number}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The serving and the load of one candidate.

    `engine` is the import path of the engine, as module:attribute. All `loads` run `repeats` times in one launch. `slo`
    are the limits for goodput, `asked` the figures that must be precise. `highest` is as in ServeSpec, `start` the load
    to try first. `client` is the command of another load client, which writes `report`. `hosts` are the names of the
    hosts of instances; none for this machine. The load goes to all instances; another client sends it to `router`.
    `protocol` is how instances that only prefill or only decode exchange caches (`load.routing`). `prefix_aware` is as
    in ServeSpec. `predicted_s` is the predicted mean time of a request of the only load.
    """

    engine: str
    instances: tuple[Instance, ...]
    loads: tuple[Load, ...]
    vocab_size: int
    timeout_s: float
    repeats: int = 1
    slo: Mapping[str, float] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    patterns: tuple[FailurePattern, ...] = ()
    directory: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    client: tuple[str, ...] | None = None
    report: str = ""
    highest: str | None = None
    start: float = 1.0
    hosts: tuple[str, ...] = ()
    router: Router | None = None
    protocol: str = ""
    prefix_aware: bool = False
    predicted_s: float | None = None


def as_text(job: Job) -> str:
    """Return a job as JSON."""
    data = asdict(job) | {"loads": [plain_load(load) for load in job.loads]}
    return json.dumps(data, indent=1, default=lambda state: state.value)


def read_job(folder: Path) -> Job:
    """Return the job in `folder`. Raises ValueError with the problem."""
    try:
        return TypeAdapter(Job).validate_json((folder / SERVE).read_bytes())
    except OSError as error:
        raise ValueError(f"{folder / SERVE} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ValueError(f"{folder / SERVE} is invalid: {error}") from None


def plain_load(load: Load) -> dict[str, Any]:
    """Return a load point as plain JSON data; an infinite rate is the text inf."""
    rate = load.request_rate
    return {**asdict(load), "request_rate": "inf" if rate is not None and math.isinf(rate) else rate}
