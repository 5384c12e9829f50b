"""Large spaces of servers are cut while they are built, and keep the candidates that the whole space has at the top."""

from typing import Any

import pytest
from flagcore_serving import bounds

from flagcore import api
from flagcore.api.commands.explain import REMOVED
from flagcore.tuner.stages import build

LAYOUTS = {"instances": [1, 2, 4], "tensor_model_parallel_size": [1, 2, 4]}
SPACES: dict[str, dict[str, Any]] = {
    "vllm": LAYOUTS
    | {"pipeline_model_parallel_size": [1, 2], "max_num_seqs": [8, 32, 128], "max_num_batched_tokens": [1024, 4096]}
    | {"kv_cache_type": ["auto", "fp8"], "cudagraph_mode": ["PIECEWISE", "FULL"], "scheduling_policy": ["fcfs"]},
    "sglang": LAYOUTS
    | {"max_running_requests": [8, 32, 128], "chunked_prefill_size": [1024, 4096], "enforce_eager": [False, True]}
    | {"kv_cache_type": ["auto", "fp8_e4m3"], "enable_mixed_chunk": [False, True], "schedule_policy": ["fcfs", "lpm"]},
    "llamacpp": LAYOUTS
    | {"parallel": [8, 32], "batch_size": [1024, 2048], "ubatch_size": [512, 1024], "flash_attention": ["on", "off"]},
    "lmdeploy": LAYOUTS
    | {"max_batch_size": [8, 32, 128], "kv_cache_type": ["none", "int8"], "max_prefill_token_num": [2048, 8192]}
    | {"block_size": [32, 64], "max_prefill_iters": [1, 2]},
}


def spec(engine: str, **slo: Any) -> dict[str, Any]:
    profile = {"input_len": 600, "output_len": 60, "concurrency": 24, "num_prompts": 48}
    return {
        "model": "Qwen/Qwen3-8B",
        "cluster": {"chip": "H100", "devices_per_node": 4},
        "serve": {"engine": engine, "profile": profile, "slo": slo},
        "auto_tuner": {"space": SPACES[engine]},
    }


def make_large(patch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((build, "BOUND_ROWS", 0), (bounds, "LARGE", 0), (bounds, "KEPT", 80)):
        patch.setattr(module, name, value)


@pytest.mark.parametrize("slo", [{}, {"tpot_s": {"p95": 0.006}}], ids=["", "a limit"])
@pytest.mark.parametrize("engine", SPACES)
def test_the_best_candidates_of_a_large_space_are_those_of_the_whole_space(
    engine: str, slo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = spec(engine, **slo)
    whole = api.estimate(data, top=5, distinct=True)
    make_large(monkeypatch)
    cut = api.estimate(data, top=5, distinct=True)
    assert cut.counts.candidates <= 81 < whole.counts.candidates
    best = [[(each["candidate"], each["objective"]) for each in plan.candidates] for plan in (cut, whole)]
    assert best[0] == best[1]


def test_what_was_cut_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    data, name = spec("llamacpp"), "beyond_the_best"
    whole = api.estimate(data, top=10**4)
    make_large(monkeypatch)
    cut = api.estimate(data, top=10**4)
    assert cut.counts.illegal[name] > 0
    kept = [each["candidate"] for each in cut.candidates]
    lost = next(each["candidate"] for each in whole.candidates if each["candidate"] not in kept)
    report = api.explain_candidate(data, ",".join(f"{knob}={value}" for knob, value in lost.items()))
    assert report.state == REMOVED
    assert [each.rule for each in report.rules] == [name]
