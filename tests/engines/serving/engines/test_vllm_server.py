"""vLLM for real: its CPU build, where it is installed, with weights that it makes up itself. A start takes a minute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.trial import TrialState
from flagcore.engines.serving.vllm.profile import WORKLOAD as ENGINE
from tests.engines.serving.engines.starting import started
from tests.engines.serving.engines.tasks import serving

pytestmark = pytest.mark.long

HERE = Path(__file__).parents[4]
PROGRAM = HERE / ".venv-vllm/bin/vllm"
ARGS = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512}
PATIENCE = 400.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not PROGRAM.exists():
        pytest.skip("make setup-vllm installs vLLM's CPU build, which is not here")
    folder = tmp_path_factory.mktemp("hf")
    subprocess.run([sys.executable, str(HERE / "examples/tiny_hf.py"), str(folder)], check=True, timeout=60)
    return str(folder)


def task(model: str) -> Any:
    command = (str(PROGRAM), "serve")
    return serving("vllm", on_cores=True, devices=2, weights=model, command=command, engine_args=ARGS)


def test_a_candidate_is_served_unchanged(model: str, tmp_path: Path) -> None:
    requested = {
        "tensor_model_parallel_size": 2,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 64,
        "enable_prefix_caching": False,
    }
    with started(ENGINE, task(model), requested, tmp_path, PATIENCE) as server:
        assert server.wait() is None, server.log
        reported = ENGINE.effective(server.fetch, server.log)
        assert {knob: reported[knob] for knob in requested} == requested
        assert (reported["context_len"], reported["enforce_eager"]) == (512, True)
        assert server.completion_tokens(9) == 9
        assert ENGINE.read_counters(server.fetch)["output_tokens"] == 9


def test_an_illegal_block_size_fails_with_its_reason(model: str, tmp_path: Path) -> None:
    with started(ENGINE, task(model), {"block_size": 16}, tmp_path, PATIENCE) as server:
        state, reason = server.failure()
    assert state is TrialState.INVALID
    assert "No common block size for 16" in reason
