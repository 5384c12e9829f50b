"""The client against a real llama.cpp server: what it counts, and what the server itself says of the same answers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.result import LoadResult, Target
from flagcore.engines.serving.load.sending import measure
from flagcore.engines.serving.load.traffic import traffic
from flagcore.engines.serving.model.reuse import cached_tokens, prompt_parts
from tests.engines.serving.load.servers import after_each_answer

pytest.importorskip("xllamacpp", reason="pip install 'flagcore[llamacpp]' for a real server")
pytest.importorskip("gguf", reason="pip install 'flagcore[llamacpp]' to make a model")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv-heads": 2, "ffn": 256, "vocab": 1024, "context": 2048}
SERVER = ["-np", "4", "-c", "1024", "-t", "2", "--metrics", "--cache-ram", "0"]
"""Four slots of 256 tokens."""
PATIENCE = 60


class Server:
    """One llama.cpp server on a free port."""

    def __init__(self, model: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        program = [sys.executable, "-m", "flagcore.engines.serving.llamacpp.server"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*program, "-m", model, "--port", str(port), *SERVER],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.fetch("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
            else:
                return
        raise AssertionError(log.read_text())

    def fetch(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def counted(self, name: str) -> float:
        found = re.search(rf"^llamacpp:{name} ([0-9.e+]+)$", self.fetch("/metrics"), re.MULTILINE)
        assert found
        return float(found[1])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    maker = [sys.executable, str(ROOT / "examples/tiny_gguf.py")]
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    subprocess.run([*maker, str(file), *sizes], check=True, timeout=PATIENCE)
    return str(file)


@pytest.fixture
def server(model: str, tmp_path: Path) -> Iterator[Server]:
    server = Server(model, tmp_path / "log")
    yield server
    server.kill()


def send(server: Server, load: Load, timeout_s: float = PATIENCE) -> LoadResult:
    return measure([Target(server.url)], load, model="m", vocab_size=1024, seed=0, timeout_s=timeout_s)


def test_server_counts_the_same_tokens_as_the_client(server: Server) -> None:
    result = send(server, Load(input_len=60, output_len=24, num_prompts=12, concurrency=6, range_ratio=0.5))
    assert result.problems == ()
    assert result.completed == 12
    sent = sum(one.input_tokens for one in result.requests)
    assert sent - 3 <= server.counted("prompt_tokens_total") <= sent  # a first token that a slot has is not read again
    assert server.counted("tokens_predicted_total") == sum(one.output_tokens for one in result.requests)
    assert all(one.tpot_s is not None and one.tpot_s > 0 and one.ttft_s > 0 for one in result.requests)


def test_cached_tokens_of_conversations_are_those_that_the_prediction_expects(server: Server) -> None:
    load = Load(input_len=40, output_len=8, turns=4, num_prompts=16, concurrency=2)
    assert send(server, load).problems == ()
    cached = server.counted("prompt_tokens_cached_total")
    expected = cached_tokens(prompt_parts(traffic(load), 0), capacity=1e9).sum()
    assert cached == pytest.approx(expected, rel=0.02)


def test_answer_that_does_not_fit_into_its_slot_is_reported_and_not_counted(server: Server) -> None:
    result = send(server, Load(input_len=200, output_len=100, num_prompts=2, concurrency=1))
    assert "tokens instead of 100; prompt and answer do not fit into the context of one request" in result.problems[0]
    assert not result.figures


def test_a_prompt_larger_than_its_slot_is_reported_with_the_servers_message(server: Server) -> None:
    result = send(server, Load(input_len=600, output_len=4, num_prompts=2, concurrency=1))
    assert result.problems[0].startswith("refused: HTTP 400")
    assert "context" in result.problems[0]


def test_killed_server_ends_the_load(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(done: int) -> None:
        if done == 8:
            server.kill()

    after_each_answer(monkeypatch, kill)
    load = Load(input_len=8, output_len=16, num_prompts=5000, concurrency=4)
    result = send(server, load, timeout_s=600)
    assert result.problems[0].startswith(("connection lost", "not reached"))
    assert result.completed < 5000
    assert not result.figures
