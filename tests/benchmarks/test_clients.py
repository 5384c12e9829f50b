"""The reference server keeps its schedule and logs it, and the comparison of clients prints ratios to the log."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow


@contextmanager
def server(*options: str) -> Iterator[str]:
    program = [sys.executable, str(BENCHMARKS / "reference_server.py"), *options]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def answer(url: str, path: str, **body: Any) -> list[Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode() if body else None)
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]


def test_answers_keep_the_schedule_wait_for_a_slot_and_are_logged() -> None:
    options = ("--start-ms=20", "--prompt-ms=5", "--chunk-ms=10", "--tokens-per-chunk=2", "--slots=1")
    with server(*options) as url, ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: answer(url, "/v1/completions", prompt=[7] * 6, max_tokens=6), range(2)))
        ((first, second),) = answer(url, "/log")
        assert answer(url, "/log") == [[]]
    for row in (first, second):
        assert (row["input_tokens"], row["output_tokens"], len(row["sent_s"])) == (6, 6, 4)
    assert first["sent_s"][0] - first["received_s"] >= 0.05
    assert first["sent_s"][-1] - first["received_s"] >= 0.08
    assert second["sent_s"][0] - first["received_s"] >= 0.13


def test_comparison_prints_ratios_to_the_log_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": dict.fromkeys(map(str, range(100)), 0)}}))
    command = [sys.executable, str(BENCHMARKS / "clients.py"), str(tmp_path), "--rounds", "1", "--loads", "four_tokens"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {line.split("|")[1].strip(): float(line.split("|")[2].split()[0]) for line in done.stdout.split("\n")[3:-1]}
    assert len(rows) == 18
    assert rows["`e2e_s.p50`"] >= 1.0
    run = json.loads(done.stderr.splitlines()[0])
    assert run["log"]["tpot_s.p50"] == pytest.approx(run["log"]["itl_s.mean"] / 4, rel=0.1)
