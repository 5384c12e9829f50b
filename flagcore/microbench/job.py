"""What the program is asked to measure. Plain data; nothing here imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """`kind`, `backend` and `preload` are torch's device, its collectives, and what to import before the first tensor.

    One process runs for each of `devices`. Where they are `shared`, all measure each kernel at the same time, because
    in training, too, each has its part of the machine only, and `threads` as a rank would have. `precisions` are those
    of the chip's facts; `memory_bytes` is what a process may use; `seconds` is the time for all of it. Results go to
    `output`, a file.
    """

    kind: str
    backend: str
    preload: tuple[str, ...]
    devices: int
    shared: bool
    threads: int
    precisions: tuple[str, ...]
    memory_bytes: int
    seconds: float
    output: Path


def load(path: Path) -> Job:
    """Read a job, whose keys are the fields. Raises OSError, ValueError, KeyError or TypeError."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lists = {name: tuple(data[name]) for name in ("preload", "precisions")}
    return Job(**{**data, **lists, "output": Path(data["output"])})
