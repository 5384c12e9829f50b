"""Each flag and variable of a known release has a class, and what predictions leave out is named."""

from pathlib import Path

import numpy as np
import pytest

from engines.serving.tests.engines.tasks import engine_of, planned, settings

ENGINES = ("vllm", "sglang", "lmdeploy", "llamacpp")


@pytest.mark.parametrize("engine", ENGINES)
def test_each_flag_and_variable_of_known_releases_has_a_class(engine: str) -> None:
    program, names = engine_of(engine).program, Path(__file__).parents[3] / engine / "tests" / "settings.txt"
    assert program.unclassed(names.read_text("utf-8").split()) == []
    assert program.unclassed(name for flags in program.removed.values() for name in flags) == []


@pytest.mark.parametrize(
    ("engine", "args", "named"),
    [
        ("vllm", {"fully-sharded-loras": True, "lora-modules": "a=b"}, ["fully-sharded-loras"]),
        (
            "vllm",
            {"no-enable-flashinfer-autotune": True, "no-enable-log-requests": True},
            ["no-enable-flashinfer-autotune"],
        ),
        ("vllm", {"hf-overrides": '{"rope_scaling": {"factor": 4.0}}', "seed": 0, "dtype": "auto"}, []),
        (
            "vllm",
            {"hf-overrides": '{"num_hidden_layers": 2}', "stream-interval": 20},
            ["hf-overrides", "stream-interval"],
        ),
        ("vllm", {"compilation-config": '{"cudagraph_capture_sizes": [1, 8], "cache_dir": "x"}'}, []),
        ("vllm", {"attention_backend": "FLASHINFER", "scheduling_policy": "priority"}, []),
        ("vllm", {"attention_backend": "FLEX_ATTENTION"}, ["attention_backend"]),
        ("vllm", {"compilation-config": '{"backend": "inductor"}', "dbo-prefill-token-threshold": 512}, []),
        (
            "vllm",
            {"mamba-ssu-algorithm": "simple", "dbo-prefill-token-threshold": 32},
            ["mamba-ssu-algorithm", "dbo-prefill-token-threshold"],
        ),
        ("vllm", {"kv-transfer-config": '{"kv_connector_extra_config": {"cpu_bytes_to_use": 1e9}}'}, []),
        (
            "vllm",
            {"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'},
            ["kv-transfer-config"],
        ),
        ("sglang", {"lora-backend": "triton", "trust-remote-code": True, "decode-log-interval": 1}, ["lora-backend"]),
        (
            "sglang",
            {"enable-hierarchical-cache": True, "hicache-ratio": 2, "hicache-io-backend": "direct"},
            ["hicache-io-backend"],
        ),
        ("sglang", {"cuda-graph-max-bs-decode": 256, "stream-interval": 1, "watchdog-timeout": 1000}, []),
        (
            "sglang",
            {"stream-interval": 16, "mm-preprocess-cache-size-mb": 0},
            ["stream-interval", "mm-preprocess-cache-size-mb"],
        ),
        ("lmdeploy", {"adapters": "a=b", "model-name": "m"}, ["adapters"]),
        ("llamacpp", {"spec-type": "ngram-simple", "flash-attn": "on"}, ["speculation"]),
        ("llamacpp", {"n-cpu-ffn": 12, "cpu-moe": True, "jinja": True, "no-mmap": True}, ["n-cpu-ffn"]),
    ],
)
def test_flags_that_predictions_leave_out_are_named(engine: str, args: dict[str, object], named: list[str]) -> None:
    found = engine_of(engine).unmodelled(planned(engine, engine_args=args))
    assert [each.name.removeprefix("serve.engine_args.") for each in found] == named


@pytest.mark.parametrize(
    ("engine", "args", "left_out"),
    [
        ("vllm", {"language-model-only": True}, True),
        ("sglang", {"language-model-only": True}, True),
        ("vllm", {"limit-mm-per-prompt": '{"image": 0, "video": 0}'}, True),
        ("vllm", {"limit_mm_per_prompt": '{"image": {"count": 0}, "video": {"count": 0}}'}, True),
        ("vllm", {"limit-mm-per-prompt": '{"image": 0}'}, False),
        ("vllm", {"limit-mm-per-prompt": '{"image": 1, "video": 0}'}, False),
    ],
)
def test_a_vision_tower_that_is_not_loaded_changes_nothing(
    engine: str, args: dict[str, object], left_out: bool
) -> None:
    job = planned(engine, engine_args=args)
    assert [(each.name, each.why) for each in engine_of(engine).unmodelled(job)] == [
        ("model.vision_config", "")
    ] * left_out
    assert bool(np.isinf(settings(job).tower_shares[0])) == left_out
