"""A real server of an engine, started as its adapter says, for tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore.domain.launch import Exit, classify
from flagcore.domain.spec import Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.engine import Engine
from flagcore.engines.serving.launch.server import PORT
from flagcore.engines.serving.space.hardware import Hardware
from flagcore.engines.serving.space.placement import placements
from flagcore.engines.serving.trial.failures import wait_until_quiet

SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv-heads": 2, "ffn": 256, "vocab": 1024, "context": 2048}
"""The shape of `tiny_model`."""


def tiny_model(folder: Path) -> str:
    """Return the file of a llama of random weights."""
    maker, file = Path(__file__).parents[4] / "examples/tiny_gguf.py", folder / "tiny.gguf"
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    subprocess.run([sys.executable, str(maker), str(file), *sizes], check=True, timeout=60)
    return str(file)


@dataclass
class Running:
    """A started server and its log."""

    engine: Engine
    url: str
    file: Path
    process: subprocess.Popen[bytes]
    patience: float

    @property
    def log(self) -> str:
        return self.file.read_text(errors="replace")

    def fetch(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def wait(self) -> int | None:
        """Wait until it is healthy, and return None, or until it has ended, and return its exit code."""
        end = time.monotonic() + self.patience
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.fetch(self.engine.reports.health)
            except OSError:
                time.sleep(0.05)
            else:
                wait_until_quiet(self.file)
                return None
        assert self.process.poll() is not None, self.log
        return self.process.poll()

    def completion_tokens(self, wanted: int) -> int:
        """Ask for an answer of `wanted` tokens, and return how many it has."""
        model = json.loads(self.fetch("/v1/models"))["data"][0]["id"]
        body = {"model": model, "prompt": [300, 301, 302], "max_tokens": wanted, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self.patience) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    def failure(self) -> tuple[TrialState, str]:
        """Return why it ended."""
        code = self.wait()
        assert code
        return classify(Exit(code=code, ended_by=None, duration_s=1.0), self.log, self.engine.reports.failures)


@contextmanager
def started(
    engine: Engine, task: Task, values: Mapping[str, Any], folder: Path, patience: float = 150.0
) -> Iterator[Running]:
    """Start the first instance of a candidate, engine's defaults but for `values`, and stop it in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    placement = placements(task, {**engine.defaults(task), **values})[0]
    server = engine.server(task, placement.values, Hardware.of(task).cores(placement.first, placement.width))
    argv, file = [word.replace(PORT, port) for word in server.argv], folder / "log"
    with file.open("wb") as log:
        environment = {**os.environ, **server.environment}
        process = subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
        )
    try:
        yield Running(engine, f"http://127.0.0.1:{port}", file, process, patience)
    finally:
        process.terminate()
        try:
            process.wait(patience)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
