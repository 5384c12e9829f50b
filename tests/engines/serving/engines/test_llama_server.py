"""llama.cpp for real: the wheel's server, started by what the adapter says, on a small model of random weights."""

from pathlib import Path
from typing import Any

import pytest

from flagcore.domain.trial import TrialState
from flagcore.engines.serving.llamacpp.profile import WORKLOAD as ENGINE
from flagcore.spec.models import context_length, gguf_shape
from tests.engines.serving.engines.starting import SIZES, started, tiny_model
from tests.engines.serving.engines.tasks import serving

pytest.importorskip("xllamacpp", reason="pip install 'flagcore[llamacpp]' for a real server")
pytest.importorskip("gguf", reason="pip install 'flagcore[llamacpp]' to make a model")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_a_candidate_is_served_unchanged_and_stops_on_a_signal(model: str, tmp_path: Path) -> None:
    task = serving("llamacpp", on_cores=True, devices=2, weights=model)
    requested = {
        "parallel": 2,
        "threads": 1,
        "threads_batch": 2,
        "batch_size": 256,
        "ubatch_size": 64,
        "flash_attention": "on",
        "kv_cache_type": "q8_0",
        "kv_unified": "off",
        "context_len": 512,
    }
    with started(ENGINE, task, requested, tmp_path) as server:
        assert server.wait() is None, server.log
        assert ENGINE.reports.effective(server.fetch, server.log) == requested
        assert server.completion_tokens(9) == 9
        counted = ENGINE.reports.read_counters(server.fetch)
        assert counted["output_tokens"] == 9
        assert counted["prompt_tokens"] == 3
        assert counted["requests_waiting"] == 0
    assert server.process.returncode == 0


def test_drafted_tokens_are_counted(model: str, tmp_path: Path) -> None:
    own_draft = {"spec-draft-model": model, "spec-draft-p-min": 0}
    task = serving("llamacpp", on_cores=True, devices=2, weights=model, engine_args=own_draft)
    with started(ENGINE, task, {"speculation": "draft-simple", "parallel": 1, "context_len": 512}, tmp_path) as server:
        assert server.wait() is None, server.log
        assert server.completion_tokens(20) == 20
        counted = ENGINE.reports.read_counters(server.fetch)
    assert counted["drafted_tokens"] > 0
    assert 0 <= counted["accepted_tokens"] <= counted["drafted_tokens"]


def test_the_defaults_of_llama_cpp_are_read_back(model: str, tmp_path: Path) -> None:
    task = serving("llamacpp", on_cores=True, devices=2, weights=model)
    with started(ENGINE, task, {}, tmp_path) as server:
        assert server.wait() is None, server.log
        reported = ENGINE.reports.effective(server.fetch, server.log)
    assert (reported["parallel"], reported["batch_size"], reported["ubatch_size"], reported["kv_unified"]) == (
        4,
        2048,
        512,
        "on",
    )
    expected = ENGINE.settings(task, {})
    assert reported["kv_cache_type"] == "f16"
    assert expected.max_running.item() == 4
    assert expected.context_len.item() == SIZES["context"]


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
    task = serving("llamacpp", on_cores=True, devices=2, weights=model)
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")  # which takes seconds
    with started(ENGINE, task, values, tmp_path) as server:
        state, reason = server.failure()
    assert state is TrialState.INVALID
    assert says in reason


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
