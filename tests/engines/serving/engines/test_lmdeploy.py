"""LMDeploy: knobs, rules, settings, the command line and what is read back, as its documentation has them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flagcore.api.managing import inspection
from flagcore.api.managing.inspection import doctor
from flagcore.domain.launch import Exit, classify
from flagcore.domain.spec import Task
from flagcore.domain.trial import TrialState
from flagcore.engines.serving.launch.server import PORT, Instance
from flagcore.engines.serving.lmdeploy.profile import WORKLOAD
from flagcore.engines.serving.load.result import GENERATE
from flagcore.engines.serving.load.stream import Stream
from flagcore.engines.serving.load.traffic import body
from flagcore.engines.serving.space.weights import weight_bytes
from flagcore.errors import SpecError
from tests.engines.serving.engines.tasks import broken, merged, row, serving, space_of
from tests.served import costs
from tests.small import EXPERTS

TURBOMIND_LOG = """turbomind engine config:

dtype=bfloat16, state_dtype=bfloat16, session_len=4096, max_batch_size=64, devices=[0, 1], tp=2, dp=1, cp=1, ep=1
[TM][INFO] Object cache budget: 2048.00 MB from free 2560.00 MB and ratio 0.800
"""
PYTORCH_LOG = (
    "Building CacheEngine with config: \nCacheConfig(max_batches=32, block_size=64, num_cpu_blocks=0, "
    "num_gpu_blocks=100, cache_max_entry_count=0.9, max_prefill_token_num=8192, enable_prefix_caching=True)."
)


def cards(**arguments: Any) -> Task:
    return serving("lmdeploy", **{"weights": "/model", "command": ("/bin/echo", "serve", "api_server"), **arguments})


def server(task: Task, **values: Any) -> Instance:
    return WORKLOAD.server(task, {**WORKLOAD.defaults(task), **values}, ())


def settings(task: Task, **values: Any) -> Any:
    return WORKLOAD.settings(task, row(WORKLOAD, task, **values))


def test_the_defaults_of_lmdeploy_are_not_set() -> None:
    argv = server(cards()).argv
    assert argv[1:4] == ("serve", "api_server", "/model")
    assert argv[4:8] == ("--server-name", "127.0.0.1", "--server-port", PORT)
    assert not set(argv) & {"--backend", "--max-batch-size", "--cache-max-entry-count"}


def test_knobs_are_flags() -> None:
    values = {"backend": "pytorch", "tensor_model_parallel_size": 2, "kv_cache_type": "int8", "max_batch_size": 64}
    values |= {"cache_max_entry_count": "0.9", "enforce_eager": True, "enable_prefix_caching": True}
    argv = " ".join(server(cards(), **values).argv)
    for words in ("--backend pytorch", "--tp 2", "--quant-policy int8", "--max-batch-size 64"):
        assert words in argv
    for words in ("--cache-max-entry-count 0.9", "--eager-mode", "--enable-prefix-caching"):
        assert words in argv


def test_tp_counts_all_devices_with_attention_dp_or_a_group_with_experts() -> None:
    both = {"tensor_model_parallel_size": 2, "data_parallel_size": 2}
    assert server(cards(), **both).argv[-4:] == ("--tp", "4", "--dp", "2")
    assert server(cards(), **both, expert_model_parallel_size=4).argv[-6:] == ("--tp", "2", "--dp", "2", "--ep", "4")


def test_names_of_other_engines_and_codes_of_lmdeploy_are_understood() -> None:
    arguments = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "page_size": 64, "quant_policy": 8}
    assert WORKLOAD.parse(arguments) == {
        "max_batch_size": 8,
        "max_prefill_token_num": 4096,
        "block_size": 64,
        "kv_cache_type": "int8",
    }


def test_reserved_flags_are_rejected() -> None:
    for flag in ("server_port", "api-keys", "log-level"):
        with pytest.raises(SpecError) as error:
            WORKLOAD.axes(cards(engine_args={flag: "x"}))
        assert error.value.key == f"serve.engine_args.{flag.replace('_', '-')}"


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ("cards", {"tensor_model_parallel_size": 4, "instances": 2}),
        ("attention_heads", {"tensor_model_parallel_size": 3}),
        ("tensor_power_of_two", {"tensor_model_parallel_size": 3}),
        ("pytorch_parallel", {"backend": "pytorch", "data_parallel_size": 2}),
        ("expert_parallel", {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}),
        ("cache_share", {"cache_max_entry_count": "1"}),
        ("cache_type", {"kv_cache_type": "fp8"}),
        ("cache_type", {"backend": "turbomind", "kv_cache_type": "turbo_quant"}),
        ("block_size", {"block_size": 48}),
        ("block_size", {"backend": "pytorch", "block_size": 96}),
        ("turbomind_only", {"backend": "pytorch", "num_tokens_per_iter": 512}),
        ("pytorch_only", {"enforce_eager": True}),
        ("context_length", {"context_len": 191}),
    ],
)
def test_settings_that_lmdeploy_rejects_are_illegal(rule: str, values: dict[str, Any]) -> None:
    assert rule in broken(WORKLOAD, cards(model=EXPERTS), **values)


def test_settings_that_lmdeploy_accepts_are_legal() -> None:
    task = cards(model=EXPERTS)
    assert not broken(WORKLOAD, task, backend="pytorch", kv_cache_type="fp8", block_size=32, enforce_eager=True)
    assert not broken(WORKLOAD, task, block_size=96, data_parallel_size=2, expert_model_parallel_size=2)
    assert "no_cores" in broken(WORKLOAD, cards(on_cores=True))


def test_a_default_is_not_another_candidate() -> None:
    defaults = {"backend": "turbomind", "block_size": 64, "max_prefill_token_num": 8192, "kv_cache_type": "none"}
    found = merged(WORKLOAD, cards(), **defaults)
    assert not any(found[knob] for knob in defaults)


def test_the_cache_is_a_share_of_the_memory_without_weights() -> None:
    task = cards(memory=24 * 2**30)
    free = 24 * 2**30 - weight_bytes(task)
    assert settings(task).cache_bytes == pytest.approx(0.8 * free)
    assert settings(task, cache_max_entry_count="0.5").cache_bytes == pytest.approx(0.5 * free)
    buffers = 2.0 * (8192 + 2 * 128) * task.spec.model.vocab_size
    assert settings(task, backend="pytorch").cache_bytes == pytest.approx(0.8 * (free - buffers))
    assert settings(task, kv_cache_type="int4").cache_element_bytes == 0.5


def test_only_the_pytorch_engine_captures_graphs() -> None:
    assert [settings(cards(), backend=each).graphs.item() for each in ("turbomind", "pytorch")] == [0, 1]


def test_values_in_the_log_of_either_engine_are_read_back() -> None:
    assert WORKLOAD.reports.effective(lambda path: "", TURBOMIND_LOG) == {
        "backend": "turbomind",
        "context_len": 4096,
        "max_batch_size": 64,
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }
    assert WORKLOAD.reports.effective(lambda path: "", PYTORCH_LOG) == {
        "backend": "pytorch",
        "max_batch_size": 32,
        "block_size": 64,
        "cache_max_entry_count": "0.9",
        "max_prefill_token_num": 8192,
        "enable_prefix_caching": True,
    }
    assert WORKLOAD.reports.memory(TURBOMIND_LOG) == {"kv_cache_gib": 2.0}
    assert WORKLOAD.reports.memory(PYTORCH_LOG) == {"kv_cache_tokens": 6400.0}


def test_the_documented_metrics_are_read() -> None:
    text = 'lmdeploy:num_requests_running{model_name="m",engine="0"} 3.0\nlmdeploy:generation_tokens_total{e="0"} 9.0\n'
    assert WORKLOAD.reports.read_counters(lambda path: text) == {"requests_running": 3.0, "output_tokens": 9.0}


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("RuntimeError: No enough gpu memory for kv cache.", TrialState.OUT_OF_MEMORY),
        ("AssertionError: no valid parallel config: dp=1, tp=3, ep=2", TrialState.INVALID),
        ("lmdeploy: error: unrecognized arguments: --x", TrialState.INVALID),
        ("ValueError: something else", TrialState.FAILED),
    ],
)
def test_failures_are_classified(line: str, state: TrialState) -> None:
    assert classify(Exit(code=1, ended_by=None, duration_s=1.0), line, WORKLOAD.reports.failures)[0] is state


def test_a_request_has_token_ids_and_a_streamed_answer() -> None:
    sent = json.loads(body("m", np.array([5, 6, 7]), 2, GENERATE))
    assert (sent["input_ids"], sent["max_tokens"], sent["ignore_eos"]) == ([5, 6, 7], 2, True)
    stream = Stream()
    for result, finish in ((1, None), (2, {"type": "length"})):
        meta = {"prompt_tokens": 3, "completion_tokens": result, "finish_reason": finish}
        event = json.dumps({"text": "a", "output_ids": [9], "meta_info": meta})
        stream.feed(f"data: {event}\n\n".encode(), 10.0 + result)
    stream.feed(b"data: [DONE]\n\n", 12.0)
    answer = stream.answer(sent_s=10.0, start_s=0.0, input_tokens=3, output_tokens=2, target=0)
    assert (answer.ttft_s, answer.tpot_s) == (1.0, 1.0)


def test_untested_support_is_reported_to_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "version", lambda name: "0.18.1")
    (part,) = [part for part in doctor() if part["name"] == "lmdeploy"]
    assert (part["ok"], part["fix"]) == ("untested", WORKLOAD.untested)
    on_chip = [part["ok"] for part in doctor() if "lmdeploy on this chip" in part["for"]]
    assert True not in on_chip


def test_it_is_estimated_with_a_wide_interval_and_no_other_engines_overheads() -> None:
    task = cards(space={"backend": "auto", "max_batch_size": (16, 64)}, memory=80 * 2**30)
    task = replace(task, spec=replace(task.spec, objective="output_tokens_per_s"))
    space = space_of(WORKLOAD, task)
    found = WORKLOAD.predict(task, space.columns(), costs())
    assert len(space) == 4
    assert np.isfinite(found.step_time_s).all()
    assert (found.high_s / found.low_s > 4.0).all()
    assert WORKLOAD.overheads_for(task, on_host=False).iteration == 0.0
