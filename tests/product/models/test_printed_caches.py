"""Caches that vLLM and SGLang printed at start-up, in GiB of a device: nothing was fitted to these lines."""

from typing import Any

import pytest

from flagcore.api import estimate_jobs

BLOCK = 49 * 2**20
"""Bytes of a block of Qwen3.6-27B on one device: states of 16 layers."""
FORMATS = {"FP8": "fp8", "NVFP4": "nvfp4", "INT4": "int4"}
"""Precisions by the ends of models' names."""


def memory_of(
    chip: str,
    devices: int,
    version: str,
    model: str,
    args: dict[str, Any] | None = None,
    engine: str = "vllm",
    **candidate: Any,
) -> Any:
    """Return the memory of one instance on all devices. `args`: other flags of the engine."""
    job: Any = {
        "id": model,
        "kind": "serve",
        "model": model,
        "cluster": {"chip": chip, "devices": devices, "devices_per_node": devices},
        "serve": {"engine": engine, "engine_version": version, "input_len": 64, "output_len": 2},
        "candidate": {"tensor_model_parallel_size": devices, **candidate},
    }
    job["serve"] |= {"num_prompts": 2, "concurrency": 1, "precision": FORMATS.get(model.rpartition("-")[2], "bf16")}
    job["serve"] |= {"engine_args": args} if args else {}
    (record,) = estimate_jobs([job])
    return record["memory"]


MTP_3: dict[str, Any] = {
    "speculation": "mtp",
    "speculative_tokens": 3,
    "kv_cache_type": "fp8",
    "context_len": 262144,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.92,
}


@pytest.mark.parametrize(
    ("chip", "devices", "version", "model", "candidate", "gib"),
    [
        # vllm-project/recipes pull requests 551 (856 blocks of states) and 831 (939 and 556; a build of August 2026)
        ("H100-SXM", 1, "0.23.0", "Qwen/Qwen3.6-27B-FP8", {"gpu_memory_utilization": 0.95}, 856 * BLOCK / 2**30),
        ("RTX-PRO-6000", 1, "0.27.0", "Qwen/Qwen3.8-27B-FP8", {}, 939 * BLOCK / 2**30),
        ("RTX-PRO-6000", 1, "0.27.0", "Qwen/Qwen3.8-27B", {"gpu_memory_utilization": 0.95}, 556 * BLOCK / 2**30),
        # mitchross/talos-argocd-proxmox pull request 1995
        (
            "RTX-3090",
            2,
            "0.26.0",
            "Qwen/Qwen3.6-27B-FP8",
            {"max_num_seqs": 3, "max_num_batched_tokens": 8192, "context_len": 262144, "kv_cache_type": "fp8"},
            4.99,
        ),
        # aarora79/agentic-coding-harness-benchmarks @c15f7cfc and @ca4774c7 `self-hosted/vllm/models`
        (
            "L40S",
            1,
            "0.27.1",
            "Qwen/Qwen3.8-27B-FP8",
            {
                "max_num_seqs": 32,
                "max_num_batched_tokens": 8192,
                "context_len": 65536,
                "gpu_memory_utilization": 0.9,
            },
            8.29,
        ),
        ("H200", 8, "0.25.1", "zai-org/GLM-5.2-FP8", {"context_len": 1_000_000, "gpu_memory_utilization": 0.9}, 26.5),
        # noonghunna/club-3090 issues 849 and 602: nvidia's checkpoint with a head of 4 bits, and a cache with scales
        ("RTX-5090", 2, "0.25.1", "nvidia/Qwen3.6-27B-NVFP4", MTP_3 | {"gpu_memory_utilization": 0.85}, 14.68),
        ("RTX-3090", 2, "0.24.0", "Qwen/Qwen3.6-27B-FP8", MTP_3 | {"kv_cache_type": "int8_per_token_head"}, 5.23),
        # eight lines of one log of August 2026, "qwen3-235b" on four RTX PRO 6000
        (
            "RTX-PRO-6000",
            4,
            "0.27.0",
            "Qwen/Qwen3-235B-A22B-FP8",
            {"context_len": 32768, "max_num_seqs": 32, "gpu_memory_utilization": 0.9},
            27.85,
        ),
        # myoceane.fr, 2026-04-18, "vLLM A100": with its vision tower
        ("A100-80GB", 1, "0.19.0", "google/gemma-4-26B-A4B", {"enforce_eager": True, "context_len": 131072}, 21.5),
    ],
)
def test_caches_have_the_printed_size(
    chip: str, devices: int, version: str, model: str, candidate: dict[str, Any], gib: float
) -> None:
    memory = memory_of(chip, devices, version, model, **candidate)
    assert memory["kv_cache_gib"] == pytest.approx(gib, rel=0.05)


def test_a_server_without_blocks_for_the_states_of_its_sequences_does_not_start() -> None:
    """It has 939 blocks for 1,024 sequences: the profile charges graphs with buffers of prompts."""
    of: dict[str, Any] = {"chip": "RTX-PRO-6000", "devices": 1, "model": "Qwen/Qwen3.8-27B-FP8"}
    assert not memory_of(version="0.27.0", **of)["fits"]
    assert memory_of(version="0.27.0", **of, max_num_seqs=512)["fits"]
    assert memory_of(version="0.25.0", **of)["fits"]


@pytest.mark.parametrize(
    ("version", "args", "token"),
    [
        ("0.24.0", {}, 4.18 * 2**30 / 314979),  # noonghunna/club-3090 discussion 706
        ("0.24.0", {"mamba-cache-mode": "align"}, 2.7e3),
        ("0.28.0", {}, 2.7e3),  # `models/config.py`: align by default
    ],
)
def test_before_0_28_cached_prefixes_have_a_state_for_each_block(
    version: str, args: dict[str, Any], token: float
) -> None:
    candidate: dict[str, Any] = {
        "enable_prefix_caching": True,
        "kv_cache_type": "fp8",
        "context_len": 200000,
        "max_num_seqs": 2,
    }
    candidate |= {"speculation": "mtp", "speculative_tokens": 3, "gpu_memory_utilization": 0.85}
    name = "nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-NVFP4"
    args = {"mamba-ssm-cache-dtype": "float16", **args}
    memory = memory_of("RTX-3090", 4, version, name, args, **candidate)
    assert memory["kv_cache_gib"] * 2**30 / memory["kv_cache_tokens"] == pytest.approx(token, rel=0.12)


MTP: dict[str, Any] = {
    "speculation": "EAGLE",
    "speculative_tokens": 4,
    "kv_cache_type": "fp8_e4m3",
    "chunked_prefill_size": 2048,
}
MTP |= {"max_running_requests": 1, "context_len": 262144, "mem_fraction_static": 0.9}


@pytest.mark.parametrize(("states", "tokens"), [("float32", 394_661), ("bfloat16", 409_552)])
def test_caches_of_sglang_leave_room_for_the_tables_of_drafts(states: str, tokens: int) -> None:
    """noonghunna/club-3090 @0a62f947 `models/qwen3.8-27b/sglang/compose/dual/autoround-int4/mtp.yml`, 2026-09-10."""
    of: dict[str, Any] = {"chip": "RTX-3090", "devices": 2, "model": "Qwen/Qwen3.8-27B-INT4", "engine": "sglang"}
    of["args"] = {"mamba-ssm-dtype": states}
    memory = memory_of(version="0.5.19", **of, **MTP)
    assert memory["kv_cache_tokens"] == pytest.approx(tokens, rel=0.05)
    older = memory_of(version="0.5.13", **of, **MTP)
    assert older["kv_cache_tokens"] > 1.2 * memory["kv_cache_tokens"]  # sized before the draft is loaded


def test_caches_of_sglang_on_one_device() -> None:
    """sgl-project/sglang `docs/backend/send_request.ipynb`, run of 2025-01-23."""
    model = "meta-llama/Llama-3.1-8B-Instruct"
    memory = memory_of("H100-SXM", 1, "0.4.2", model, {}, engine="sglang", mem_fraction_static=0.88)
    assert memory["kv_cache_gib"] == pytest.approx(54.26, rel=0.02)
    assert memory["kv_cache_tokens"] == pytest.approx(444_500, rel=0.02)
