"""vLLM for real: its CPU build, where it is installed, with weights that it makes up itself. A start takes a minute."""

import json
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from flagcore_serving.job import Load
from flagcore_serving.launch.server import read_job
from flagcore_serving.trial.__main__ import running_servers
from flagcore_serving.trial.failures import log_text
from flagcore_serving.trial.loads import LoadRunner
from flagcore_serving.trial.servers import listeners
from flagcore_vllm.engine import ENGINE as ENGINE

from engines.serving.tests.engines.starting import started
from engines.serving.tests.engines.tasks import serving
from engines.serving.tests.load.servers import send
from flagcore.domain.space import Candidate
from tests.product.tasks import platform as small_platform

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


def task(model: str, **arguments: Any) -> Any:
    loads = (Load(input_len=256, output_len=16, num_prompts=32, concurrency=8),)
    arguments |= {"weights": model, "command": (str(PROGRAM), "serve"), "engine_args": ARGS, "loads": loads}
    return serving("vllm", on_cores=True, devices=2, **arguments)


def test_a_candidate_is_served_unchanged(model: str, tmp_path: Path) -> None:
    requested = {
        "tensor_model_parallel_size": 2,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "block_size": 64,
        "enable_prefix_caching": False,
    }
    with started(ENGINE, task(model), requested, tmp_path, PATIENCE) as server:
        reported = ENGINE.reports.effective(server.fetch, log_text(server.log))
        assert {knob: reported[knob] for knob in requested} == requested
        assert (reported["context_len"], reported["enforce_eager"]) == (512, True)
        assert send(server.url, load=Load(input_len=3, output_len=9, num_prompts=1, concurrency=1)).problems == ()
        assert ENGINE.reports.read_counters(server.fetch)["output_tokens"] == 9


def tokens_of(url: str, model: str, prompt: list[int], count: int = 16) -> list[int]:
    """The tokens of the most likely answer to a prompt."""
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


@pytest.mark.timeout(3 * PATIENCE)
def test_a_pair_answers_as_one_server_does(model: str, tmp_path: Path) -> None:
    """One instance prefills, another one decodes, and the caches move through a folder; each has one core."""
    draw = random.Random(7)
    prompts = [[draw.randrange(8000) for _ in range(length)] for length in (5, 140, 300, 400)]
    with started(ENGINE, task(model), {}, tmp_path, PATIENCE) as server:
        expected = [tokens_of(server.url, model, prompt) for prompt in prompts]
    pair = small_platform(task(model, space={"prefill_decode": ("1xtp1+1xtp1",)}))
    candidate = Candidate.of({**ENGINE.defaults(pair.task), "prefill_decode": "1xtp1+1xtp1"})
    ENGINE.launch(pair, candidate, str(tmp_path))
    job, deadline = read_job(tmp_path), time.monotonic() + PATIENCE
    with running_servers(job, ENGINE.reports, tmp_path, deadline) as servers:
        for prompt, tokens in zip(prompts, expected, strict=True):
            tokens_of(servers[0].url, model, prompt, count=1)
            assert tokens_of(servers[1].url, model, prompt) == tokens
        assert "Inject KV cache of 384 tokens" in log_text(servers[1].log), "of the last prompt, three blocks"
        (point,) = LoadRunner(job, ENGINE.reports, servers, tmp_path, deadline).points()
        ports = [int(str(each.url).rpartition(":")[2]) for each in servers]
    assert point["repeats"][0]["completed"] == 32
    assert point["repeats"][0]["figures"]["output_tokens_per_s"] > 0
    assert all(listeners(port) == [] for port in ports)
    assert not (tmp_path / "shared").exists()
