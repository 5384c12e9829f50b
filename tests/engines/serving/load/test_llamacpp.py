"""The client against a real llama.cpp server: what it counts, and what the server itself says of the same answers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as ENGINE
from flagcore.engines.serving.load.traffic import traffic
from flagcore.engines.serving.model.simulated_load import cached_tokens, prompt_parts
from tests.engines.serving.engines.starting import Running, started, tiny_model
from tests.engines.serving.engines.tasks import serving
from tests.engines.serving.load.servers import send

pytest.importorskip("xllamacpp", reason="pip install 'flagcore[llamacpp]' for a real server")
pytest.importorskip("gguf", reason="pip install 'flagcore[llamacpp]' to make a model")

pytestmark = pytest.mark.slow

VALUES = {"parallel": 4, "context_len": 256, "threads": 2, "kv_unified": "off"}
"""Four slots of 256 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: str, tmp_path: Path) -> Iterator[Running]:
    task = serving("llamacpp", on_cores=True, devices=2, weights=model, engine_args={"cache-ram": 0})
    with started(ENGINE, task, VALUES, tmp_path) as server:
        assert server.wait() is None, server.log
        yield server


def counted(server: Running, name: str) -> float:
    found = re.search(rf"^llamacpp:{name} ([0-9.e+]+)$", server.fetch("/metrics"), re.MULTILINE)
    assert found
    return float(found[1])


def test_server_counts_the_same_tokens_as_the_client(server: Running) -> None:
    load = Load(input_len=60, output_len=24, num_prompts=12, concurrency=6, range_ratio=0.5)
    result = send(server.url, load=load, vocab_size=1024)
    assert result.problems == ()
    assert result.completed == 12
    sent = sum(one.input_tokens for one in result.requests)
    assert sent - 3 <= counted(server, "prompt_tokens_total") <= sent  # a first token that a slot has is not read again
    assert counted(server, "tokens_predicted_total") == sum(one.output_tokens for one in result.requests)
    times = [(one.tpot_s, one.ttft_s) for one in result.requests]
    # on a busy machine, the tokens of an answer arrive together: TPOT is 0
    assert all(tpot is not None and tpot >= 0 and ttft > 0 for tpot, ttft in times), times


def test_cached_tokens_of_conversations_are_those_that_the_prediction_expects(server: Running) -> None:
    load = Load(input_len=40, output_len=8, turns=4, num_prompts=16, concurrency=2)
    assert send(server.url, load=load).problems == ()
    cached = counted(server, "prompt_tokens_cached_total")
    expected = cached_tokens(prompt_parts(traffic(load), 0), capacity=1e9).sum()
    assert cached == pytest.approx(expected, rel=0.02)


def test_answer_that_does_not_fit_into_its_slot_is_reported_and_not_counted(server: Running) -> None:
    result = send(server.url, load=Load(input_len=200, output_len=100, num_prompts=2, concurrency=1))
    assert "tokens instead of 100; prompt and answer do not fit into the context of one request" in result.problems[0]
    assert not result.figures
