"""The job of the program, as plain data without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """`kind`, `backend`, `preload`: torch device, collectives, and modules to import first.

    One process runs for each of `devices`. If they are `shared`, all measure each kernel at once, because ranks
    in training also share the machine, with `threads` each. `precisions` are those of the chip's facts;
    `memory_bytes` is the limit of a process, `seconds` that of the whole job. Results go to the file `output`.
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
