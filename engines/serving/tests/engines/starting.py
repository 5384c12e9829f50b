"""A real server of an engine, started as its adapter says, for tests."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flagcore_serving.engine import ServingEngine
from flagcore_serving.trial.failures import wait_until_quiet
from flagcore_serving.trial.servers import Server

from engines.serving.tests.engines.tasks import server
from flagcore.domain.spec import Task

SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv-heads": 2, "ffn": 256, "vocab": 1024, "context": 2048}
"""The shape of `tiny_model`."""


def tiny_model(folder: Path, shape: Mapping[str, int] = SIZES) -> str:
    """Return the file of a llama of random weights, of the example's shape but for `shape`."""
    maker, file = Path(__file__).parents[4] / "examples/tiny_gguf.py", folder / "tiny.gguf"
    sizes = [f"--{name}={size}" for name, size in shape.items()]
    subprocess.run([sys.executable, str(maker), str(file), *sizes], check=True, timeout=60)
    return str(file)


@contextmanager
def started(
    engine: ServingEngine, task: Task, values: Mapping[str, Any], folder: Path, patience: float = 150.0
) -> Iterator[Server]:
    """Start the first instance of a candidate, engine's defaults but for `values`, and stop it in the end.

    Raises TrialFailure if it does not become healthy.
    """
    running = Server("server", server(task, **values), folder / "log", engine.reports.failures)
    try:
        running.start(str(folder))
        running.wait_until_healthy(engine.reports.health, time.monotonic() + patience)
        wait_until_quiet(running.log)
        yield running
    finally:
        running.stop()
