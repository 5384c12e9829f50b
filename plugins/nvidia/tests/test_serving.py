"""Predicted against measured: vLLM 0.20.2 serving Qwen3-8B (dummy bf16 weights, prompts of token ids) on one H200.

The points were measured for flagcore. The times of this release were fitted to them, so the test only prevents
regressions.
"""

from typing import Any

import pytest

from flagcore.api import estimate_jobs

QWEN3_8B = {
    "num_layers": 36,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 151936,
    "qk_layernorm": True,
}
LOADS = {"burst": (1024, 128, 128, 128), "waves": (512, 256, 64, 192), "alone": (256, 32, 1, 16)}
SETTINGS: dict[str, dict[str, Any]] = {
    "own": {},
    "small": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "eager": {"enforce_eager": True},
}
MEASURED = {
    ("own", "burst"): (3508, 2.088),
    ("own", "waves"): (6368, 0.465),
    ("own", "alone"): (163, 0.013),
    ("small", "burst"): (1741, 3.997),
    ("small", "waves"): (4671, 0.263),
    ("small", "alone"): (169, 0.026),
    ("eager", "burst"): (2343, 2.217),
    ("eager", "waves"): (2016, 0.502),
    ("eager", "alone"): (38, 0.052),
}
"""Output tokens per second, and the median time to the first token in seconds."""


def record(setting: str, load: str, engine: str = "vllm", **more: Any) -> dict[str, Any]:
    prompt, output, clients, prompts = LOADS[load]
    sent: dict[str, Any] = {"input_len": prompt, "output_len": output, "concurrency": clients, "num_prompts": prompts}
    return {
        "id": f"{setting} {load}",
        "kind": "serve",
        "model": QWEN3_8B,
        "cluster": {"chip": "NVIDIA H200", "devices": 1, "devices_per_node": 8},
        "serve": {"engine": engine, "engine_version": "0.20.2", "precision": "bf16", **sent, **more},
        "candidate": SETTINGS[setting],
    }


def test_throughput_of_a_server_is_as_measured() -> None:
    answers = list(estimate_jobs([record(*key) for key in MEASURED]))
    off = [
        abs(answer["output_tokens_per_s"] / rate - 1)
        for answer, (rate, _) in zip(answers, MEASURED.values(), strict=True)
    ]
    assert sum(off) / len(off) < 0.08
    assert max(off) < 0.2


@pytest.mark.parametrize("load", ["burst", "waves"])
def test_settings_of_a_server_are_in_the_measured_order(load: str) -> None:
    answers = list(estimate_jobs([record(setting, load) for setting in SETTINGS]))
    rates = [answer["output_tokens_per_s"] for answer in answers]
    measured = [MEASURED[setting, load][0] for setting in SETTINGS]
    assert sorted(range(3), key=rates.__getitem__) == sorted(range(3), key=measured.__getitem__)


def test_queueing_of_a_burst_matches_measurements() -> None:
    for setting in SETTINGS:
        (answer,) = estimate_jobs([record(setting, "burst", concurrency=None, request_rate="inf")])
        rate, first = MEASURED[setting, "burst"]
        assert answer["output_tokens_per_s"] == pytest.approx(rate, rel=0.12)
        assert answer["ttft_s"]["p50"] == pytest.approx(first, rel=0.18)


@pytest.mark.parametrize("chip", ["NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize(("prompt", "output"), [(32, 16), (128, 128), (2048, 256)])
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_8_bit_products_are_never_slower_than_16_bit_ones(chip: str, prompt: int, output: int, tensor: int) -> None:
    shape = {"input_len": prompt, "output_len": output, "concurrency": 2, "num_prompts": 8}
    jobs = [record("own", "alone", **{**shape, "precision": precision}) for precision in ("bf16", "fp8")]
    for job in jobs:
        job["cluster"] = {"chip": chip, "devices": tensor, "devices_per_node": 8}
        job["candidate"] = {"tensor_model_parallel_size": tensor}
    wide, narrow = estimate_jobs(jobs)
    assert narrow["tpot_s"]["mean"] <= wide["tpot_s"]["mean"]
