"""Each flag and variable of a known release has a class, and what predictions leave out is named. What a checkpoint and
the layers of a model require of candidates: blocks, states, graphs, a baseline that fits.
Large spaces are cut while they are built, and keep the candidates that the whole space has at the top."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_models.formats import HEAD, MTP
from flagcore_models.mixers.attention import Indexer
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.public import find_public
from flagcore_serving import bounds
from flagcore_serving.space.weights import ATTENTION, DENSE, EXPERTS, Quantization, context_limit, quantization

from engines.models.tests.examples import mixed
from engines.serving.tests.engines.tasks import engine_of, planned, server, settings
from flagcore import api
from flagcore.api.commands.explain import REMOVED
from flagcore.tuner.stages import build
from tests.product.serving_inputs import LATENT
from tests.product.tasks import DENSE as MODEL


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmdeploy", "llamacpp"])
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
        ("vllm", {"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'}, []),
        ("vllm", {"kv-transfer-config": '{"kv_connector": "NixlConnector"}'}, ["kv-transfer-config"]),
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


PROFILE = {"input_len": 1024, "output_len": 256, "concurrency": 64}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS_ONLY = {"quant_algo": "W4A16_NVFP4"}
LAYERS = {"self_attn": {"quant_algo": "FP8"}, "mlp": WEIGHTS_ONLY, "lm_head": WEIGHTS_ONLY}
GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}
V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "quantization_config": BLOCKS,
}


def estimate(model: str, chip: str, devices: int, space: dict[str, Any] | None = None, **serve: Any) -> api.Estimate:
    data = {
        "model": model,
        "cluster": {"chip": chip, "devices_per_node": devices},
        "serve": {"engine": "vllm", "profile": PROFILE, **serve},
    }
    return api.estimate({**data, "auto_tuner": {"space": {"instances": [1], **space}}} if space else data)


def values(found: api.Estimate, *knobs: str) -> set[tuple[Any, ...]]:
    """The values of `knobs` of the candidates that fit."""
    fitting = [each["candidate"] for each in found.candidates if each["memory"]["fits"]]
    return {tuple(candidate.get(knob) for knob in knobs) for candidate in fitting}


def test_a_shard_of_quantized_weights_is_made_of_whole_blocks() -> None:
    sizes = {"tensor_model_parallel_size": [4, 8], "expert_model_parallel_size": [1, 8]}
    found = estimate("Qwen/Qwen3-235B-A22B-FP8", "H20", 8, sizes, precision="fp8", engine_version="0.19.0")
    assert values(found, *sizes) == {(4, 1), (8, 8)}  # 1536 / 8 = 192 is no multiple of 128
    assert found.counts.illegal["quantized_blocks"] == 1
    sizes = {"tensor_model_parallel_size": [2, 4], "expert_model_parallel_size": [1, 2]}
    assert values(estimate("stepfun-ai/Step-3.5-Flash-FP8", "B200", 4, sizes), *sizes) == {(2, 1), (2, 2)}
    assert values(estimate("Qwen/Qwen3.8-Flash-Next-FP8", "H200", 2, sizes), *sizes) == {(2, 2)}  # shared ones: bf16


@pytest.mark.parametrize(("version", "fits"), [("0.23.0", set()), ("0.33.0", {(16,)})])
def test_shared_experts_of_deepseek_v4_are_padded_to_whole_blocks(version: str, fits: set[Any]) -> None:
    space = {"tensor_model_parallel_size": [8, 16], "max_num_seqs": [8], "max_num_batched_tokens": [2048]}
    found = estimate("deepseek-ai/DeepSeek-V4-Pro", "B300", 16, space, engine_version=version)
    assert values(found, "tensor_model_parallel_size") == {(8,), *fits}  # 3072 / 16 = 192 is no multiple of 128


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BLOCKS, Quantization(block=128)),
        (
            {"quant_method": "compressed-tensors", "config_groups": GROUPS, "ignore": ["re:.*self_attn.*"]},
            Quantization(block=32, bytes=0.5625, wide=frozenset([ATTENTION])),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"lm_head": {}, "-:.*attn": {}}},
            Quantization(block=128, wide=frozenset([ATTENTION])),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, Quantization()),
        ({"quant_method": "fp8", "ignored_layers": ["mlp"]}, Quantization(wide={DENSE, MTP})),
        ({"quant_method": "quark", "exclude": ["model.layers.*.self_attn.*"]}, Quantization(wide={ATTENTION})),
        ({"quant_method": "fp8", "ignore": ["re:(a+)+$", "re:["]}, Quantization()),
        (
            {"quant_method": "modelopt", "quantized_layers": LAYERS},
            Quantization(parts={ATTENTION: ("fp8", None), HEAD: ("nvfp4", None)}, weights_only=True),
        ),
        (None, None),
    ],
)
def test_the_scales_and_the_wide_parts_of_a_checkpoint_are_read(
    tmp_path: Path, config: dict[str, Any] | None, expected: Quantization | None
) -> None:
    content = {"quantization_config": config} if config else {}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert quantization(planned("vllm", weights=str(tmp_path)).spec) == expected


@pytest.mark.parametrize(
    ("name", "context", "weights"),
    [
        ("moonshotai/Kimi-K2-Thinking", 262144, Quantization(block=32, bytes=0.5625, wide={ATTENTION})),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", 262144, None),
        ("nvidia/Qwen3-30B-A3B-NVFP4", 40960, Quantization(parts={ATTENTION: ("nvfp4", None)})),
        ("amd/Qwen3-30B-A3B-MXFP4", 40960, Quantization(wide=frozenset([ATTENTION]))),
        ("amd/Kimi-K2.5-MXFP4-AttnFP8", 262144, Quantization(parts={ATTENTION: ("fp8", None)})),
        ("mistralai/Ministral-3-8B-Instruct-2512", 262144, Quantization()),
        ("mistralai/Ministral-3-8B-Reasoning-2512", 262144, None),
    ],
)
def test_a_public_name_has_the_context_and_the_format_of_its_checkpoint(
    name: str, context: int, weights: Quantization | None
) -> None:
    form = (find_public(name) or ({}, None))[1]
    spec = planned("vllm", weights=name, model=replace(MODEL, num_moe_experts=8), precision=form or "bf16").spec
    assert context_limit(spec) == context
    assert quantization(spec) == weights


QWEN36 = Quantization(wide=frozenset({MTP}), parts={ATTENTION: ("fp8", None), HEAD: ("nvfp4", None)}, weights_only=True)


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("Qwen/Qwen3.6-27B", "nvfp4", QWEN36),  # that of its usual publisher
        ("Qwen/Qwen3.6-35B-A3B", "nvfp4", QWEN36),
        ("Qwen/Qwen3.6-27B", "int4", None),
        ("deepseek-ai/DeepSeek-V4-Flash", "mxfp4", Quantization(parts={EXPERTS: ("mxfp4", None)}, others="fp8")),
        ("deepseek-ai/DeepSeek-V4-Flash", "fp8", Quantization()),
        ("", "nvfp4", None),
    ],
)
def test_a_job_without_weights_has_the_checkpoint_that_its_precision_means(
    name: str, precision: str, expected: Quantization | None
) -> None:
    job = planned("vllm", weights=None, precision=precision, model=replace(MODEL, name=name))
    assert quantization(job.spec) == expected


@pytest.mark.parametrize(
    ("architecture", "word", "token"),
    [
        ("sm_90", "fp8_ds_mla", 656),
        ("sm_90", "fp8", 656),
        ("sm_90", None, 1152),
        ("sm_100", "fp8", 576),
        ("sm_100", "fp8_ds_mla", 656),
        ("sm_100", "nvfp4_ds_mla", 352),
        ("sm_120", None, 656),
        ("gfx942", "fp8", 576),
    ],
)
def test_sparse_latent_attention_has_caches_with_layouts_of_their_own(
    architecture: str, word: str | None, token: int
) -> None:
    sparse = mixed(LATENT, {"indexer": Indexer(heads=32, head_dim=128, top_k=2048)}, LATENT.num_layers)
    chip = {"architecture": architecture}
    element = settings(planned("vllm", chip=chip, model=sparse), kv_cache_type=word).cache_element_bytes.item()
    assert element * (512 + 64) == pytest.approx(token)


def test_sequences_in_captured_graphs_need_a_state_each() -> None:
    space = {"tensor_model_parallel_size": [1], "max_num_seqs": [None, 256, 512]}
    found = estimate("Qwen/Qwen3.6-27B", "H100-SXM", 1, space, engine_version="0.25.1")
    assert values(found, "max_num_seqs") == {(256,)}
    eager = estimate("Qwen/Qwen3.6-27B", "H100-SXM", 1, {**space, "enforce_eager": [True]}, engine_version="0.25.1")
    assert values(eager, "max_num_seqs") == {(None,), (256,), (512,)}


def test_the_states_of_a_hybrid_model_force_its_block_and_its_prefixes() -> None:
    space = {"tensor_model_parallel_size": [4], "enable_prefix_caching": [True, False], "block_size": [16, 32, 64]}
    profile = {**PROFILE, "prefix_len": 500}
    found = estimate("Qwen/Qwen3.5-35B-A3B", "H100-SXM", 4, space, engine_version="0.27.1", profile=profile)
    assert values(found, "enable_prefix_caching", "block_size") == {(True, None), (False, None)}
    rates = {each["objective"]["value"] for each in found.candidates}
    # pieces of prompts end at blocks; the prefix is shorter than a block of 528
    assert max(rates) / min(rates) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("release", ["0.27.1", "0.28.0"])
def test_prefix_caching_of_a_hybrid_model_is_a_flag_of_old_releases(release: str) -> None:
    states = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=4)
    task = planned("vllm", model=mixed(MODEL, states, 2), engine_version=release)
    passed = release == "0.27.1"
    assert ("--enable-prefix-caching" in server(task, enable_prefix_caching=True).argv) is passed


def test_graphs_of_attention_ranks_take_what_the_engine_reserves_for_them() -> None:
    sizes = {"tensor_model_parallel_size": [1], "data_parallel_size": [8], "mem_fraction_static": ["0.85", "0.9"]}
    found = estimate("zai-org/GLM-5.1-FP8", "B200", 8, sizes, engine="sglang", engine_version="0.5.12")
    assert ("0.85",) in values(found, "mem_fraction_static")
    assert ("0.9",) not in values(found, "mem_fraction_static")


@pytest.mark.costly
def test_a_baseline_that_does_not_fit_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    layouts = {"tensor_model_parallel_size": [8], "decode_context_parallel_size": [1, 2], "max_num_seqs": [16, 64]}
    found = estimate(str(tmp_path), "H20", 8, layouts, engine_args={"max-model-len": 131072})
    assert found.baseline["memory"]["fits"]
    assert "baseline" in found.unmet


def test_sglang_runs_as_many_sequences_as_the_states_that_it_sets_aside_allow() -> None:
    sizes = {"tensor_model_parallel_size": [1]}

    def running(**args: Any) -> float:
        load = {"concurrency": 1024, "input_len": 8192, "output_len": 1024}
        options = {"engine": "sglang", "engine_version": "0.5.23", "engine_args": args, "profile": load}
        (found,) = estimate("Qwen/Qwen3.6-35B-A3B", "B200", 1, sizes, **options).candidates
        return float(found["objective"]["value"])

    few, usual = running(**{"mamba-full-memory-ratio": 0.1}), running()
    assert few < 0.7 * usual


LAYOUTS = {"instances": [1, 2, 4], "tensor_model_parallel_size": [1, 2, 4]}
SPACES: dict[str, dict[str, Any]] = {
    "vllm": LAYOUTS
    | {"pipeline_model_parallel_size": [1, 2], "max_num_seqs": [8, 32, 128], "max_num_batched_tokens": [1024, 4096]}
    | {"kv_cache_type": ["auto", "fp8"], "cudagraph_mode": ["PIECEWISE", "FULL"], "scheduling_policy": ["fcfs"]},
    "sglang": LAYOUTS
    | {"max_running_requests": [8, 32, 128], "chunked_prefill_size": [1024, 4096], "enforce_eager": [False, True]}
    | {"kv_cache_type": ["auto", "fp8_e4m3"], "enable_mixed_chunk": [False, True], "schedule_policy": ["fcfs", "lpm"]},
    "llamacpp": LAYOUTS
    | {"parallel": [8, 32], "batch_size": [1024, 2048], "ubatch_size": [512, 1024], "flash_attention": ["on", "auto"]},
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


@pytest.mark.parametrize(("engine", "slo"), [*((each, {}) for each in SPACES), ("vllm", {"tpot_s": {"p95": 0.006}})])
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
