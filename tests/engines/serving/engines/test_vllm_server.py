"""vLLM for real: its CPU build, where it is installed, with weights that it makes up itself. A start takes a minute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.serving import Load
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.load.result import Target
from flagcore.engines.serving.load.sending import measure
from flagcore.engines.serving.trial.program import shares
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


def test_speculation_and_prefix_caching_act_on_text(model: str, tmp_path: Path) -> None:
    """Random weights repeat a token, which n-grams predict; half of each prompt is shared."""
    requested = {"speculation": "ngram", "speculative_tokens": 3, "block_size": 32}
    text = [{"prompt": "Same words. " * 12 + f"Number {n}. " * 10, "max_tokens": 32} for n in range(6)]
    trace = tmp_path / "text.jsonl"
    trace.write_text("\n".join(map(json.dumps, text)))
    with started(ENGINE, task(model), requested, tmp_path, PATIENCE) as server:
        assert server.wait() is None, server.log
        reported = ENGINE.effective(server.fetch, server.log)
        start, load = ENGINE.read_counters(server.fetch), Load(trace=str(trace), num_prompts=6, concurrency=2)
        target = Target(url=server.url)
        result = measure([target], load, model=model, vocab_size=8192, seed=1, timeout_s=PATIENCE)
        found = shares(ENGINE, start, ENGINE.read_counters(server.fetch))
    assert {knob: reported[knob] for knob in requested} == requested
    assert result.problems == ()
    assert result.requests[0].input_tokens == len("0.1\n" + text[0]["prompt"])
    assert found["acceptance_rate"] > 0.9
    assert 0.2 < found["cache_hit_rate"] < 0.9
