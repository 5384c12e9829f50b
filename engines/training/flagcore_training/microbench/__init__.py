"""The benchmark program of `flag calibrate`. It measures kernels and collectives with torch in separate processes.

It is started as `python -m flagcore_training.microbench JOB.json`. No other part of flagcore imports it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BenchmarkJob:
    """The input of the program.

    `kind` is the torch device, `backend` the backend of collectives. `preload` are modules to import first. One process
    runs for each of the `devices` devices. If the devices are `shared`, as on a CPU, each process has `threads`
    threads, and all processes measure a kernel at the same time, because ranks in training also share the machine.
    `precisions` are the precisions that the chip supports. `memory_bytes` is the memory limit of a process, `seconds`
    the time limit of the job. The results are written to the file `output`.
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


def load(path: Path) -> BenchmarkJob:
    """Read a job from a JSON file. Raises OSError, ValueError, KeyError or TypeError."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lists = {name: tuple(data[name]) for name in ("preload", "precisions")}
    return BenchmarkJob(**{**data, **lists, "output": Path(data["output"])})
