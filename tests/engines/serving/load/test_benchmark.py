"""The benchmark of the client runs, its server in a separate process, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
def test_benchmark_prints_the_rate_of_the_client_and_how_it_compares_to_the_goal() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/load_client.py"), "--requests", "8", "--tokens", "16"]
    done = subprocess.run([*command, "--repeats", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for path in ("paced", "unpaced"):
        assert figures[path]["tokens_per_s"] > 0
        assert figures[path]["ratio_to_goal"] == figures[path]["tokens_per_client_cpu_s"] / figures["goal_tokens_per_s"]
    assert figures["goal_tokens_per_s"] == 20_000
    assert "cores, Python" in figures["machine"]
