"""The benchmarks run, on small spaces and few records, and print and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_last_line_of_bench_estimate_is_its_figures_even_where_the_peer_cannot_be_installed() -> None:
    figures: dict[str, Any] = json.loads(run("estimate.py", "--tiny", "--build", "/dev/null").splitlines()[-1])
    for part in ("dense", "moe"):
        assert figures[f"{part}_candidates_per_second"] > 0
        assert figures[part]["combinations"] > figures[part]["candidates"] > figures[part]["fit"] > 0
    assert figures["ten_million"]["candidates"] > 0
    assert figures["ten_million"]["peak_mib"] > 0
    assert figures["llm_analysis_candidates_per_second"] is None
