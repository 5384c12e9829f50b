"""The comparison of clients prints ratios to the log of the reference server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.slow


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
