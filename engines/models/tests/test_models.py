"""Models of config.json, of headers of GGUF files, and with public names."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_models import catalogue, keys, public
from flagcore_models.formats import format_of_weights
from flagcore_models.gguf import context_length, gguf_shape
from flagcore_models.layers import (
    attention_by_size,
    attention_counts,
    attention_of,
    layers_of,
    mixer_counts,
    network_counts,
    own_layers,
)
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_models.parts.tower import VisionTower

from flagcore.domain.model import Model
from flagcore.errors import SpecError
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import SafeLoader
from tests.checks import refuses
from tests.tasks import VISION

ErrorOf = Callable[..., SpecError]


@pytest.fixture
def error_of() -> ErrorOf:
    """Call a function that must refuse, and return its error."""

    def call(function: Callable[..., object], *args: Any) -> SpecError:
        with pytest.raises(SpecError) as caught:
            function(*args)
        return caught.value

    return call


def read_model(source: str | Mapping[str, object], base: Path) -> Model:
    return model_from(source, base=base)


def config(kind: str, layers: int, hidden: int, ffn: int, heads: int, vocab: int, **extra: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **extra,
    }


LLAMA3 = config("llama", 32, 4096, 14336, 32, 128256, num_key_value_heads=8)
QWEN3 = config("qwen3", 36, 4096, 12288, 32, 151936, num_key_value_heads=8)
QWEN2_MOE = config("qwen2_moe", 24, 2048, 5632, 16, 151936)
QWEN3_MOE = config("qwen3_moe", 48, 2048, 6144, 32, 151936, head_dim=128)
MIXTRAL = config("mixtral", 32, 4096, 14336, 32, 32000)
DEEPSEEK_V2_LITE = config(
    "deepseek_v2", 27, 2048, 10944, 16, 102400, q_lora_rank=None, moe_intermediate_size=1408, num_experts_per_tok=6
) | {"first_k_dense_replace": 1}
LLAMA4 = config("llama4_text", 8, 256, 96, 8, 99)
GEMMA3 = config("gemma3_text", 12, 2560, 10240, 8, 262208, sliding_window=1024)
GPT_OSS = config("gpt_oss", 36, 2880, 2880, 64, 201088)
QWEN3_NEXT = config("qwen3_next", 48, 2048, 5632, 16, 151936)
QWEN35_MOE = config("qwen3_5_moe_text", 40, 2048, 512, 16, 248320)
DEEPSEEK_V3 = config("deepseek_v3", 61, 7168, 18432, 128, 129280)


@pytest.fixture
def at(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(data: dict[str, Any]) -> Path:
        (tmp_path / "Some-Model").mkdir()
        (tmp_path / "Some-Model" / "config.json").write_text(json.dumps(data))
        return tmp_path

    return write


At = Callable[[dict[str, Any]], Path]


def test_file_and_directory_give_the_same_model(at: At) -> None:
    base = at(LLAMA3)
    assert read_model("Some-Model/config.json", base) == read_model(str(base / "Some-Model"), Path("/"))


def test_keys_of_a_configuration_may_be_in_the_spec() -> None:
    assert read_model(LLAMA3, Path()).num_layers == 32
    with pytest.raises(SpecError) as raised:
        read_model({"model_type": "lama"}, Path())
    assert "model.num_hidden_layers" in [each.key for each in raised.value.problems]


def test_defaults_come_from_the_family(at: At) -> None:
    model = read_model("Some-Model", at(config("qwen3", 4, 1024, 2048, 32, 1000)))
    assert (model.kv_channels, model.num_query_groups) == (128, 32)
    assert (model.qk_layernorm, model.add_qkv_bias) == (True, False)
    assert model.untie_embeddings_and_output_weights


def test_deepseek_v3_keeps_latent_sizes_shared_experts_and_prediction_layers(at: At) -> None:
    keys = {"n_shared_experts": 2, "num_nextn_predict_layers": 1, "n_group": 8, "topk_group": 4}
    model = read_model("Some-Model", at(DEEPSEEK_V3 | keys))
    assert (model.q_lora_rank, model.kv_lora_rank, model.qk_head_dim, model.v_head_dim) == (1536, 512, 128, 128)
    assert (model.num_moe_experts, model.moe_router_topk, model.moe_ffn_hidden_size) == (256, 8, 2048)
    assert (model.moe_shared_expert_intermediate_size, model.moe_first_dense_layers) == (4096, 3)
    assert (model.mtp_num_layers, model.moe_router_num_groups, model.moe_router_group_topk) == (1, 8, 4)


def test_text_part_of_a_larger_model_is_read(at: At) -> None:
    outer = {"model_type": "mistral3", "vision_config": {}, "tie_word_embeddings": True}
    outer["text_config"] = LLAMA3 | {"tie_word_embeddings": False}
    model = read_model("Some-Model", at(outer))
    assert model.num_layers == 32
    assert not model.untie_embeddings_and_output_weights


def windows_of(model: Model) -> dict[int | None, int]:
    return {mixer.window: number for mixer, number in attention_counts(model).items()}


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({}, {1024: 10, None: 2}),
        ({"sliding_window_pattern": 4}, {1024: 9, None: 3}),
        ({"layer_types": ["sliding_attention"] * 12}, {1024: 12}),
        ({"layer_types": ["full_attention"] * 12}, {None: 12}),
    ],
)
def test_layers_with_windows_are_counted(at: At, extra: dict[str, Any], windows: dict[int | None, int]) -> None:
    assert windows_of(read_model("Some-Model", at(GEMMA3 | extra))) == windows


@pytest.mark.parametrize(
    ("data", "extra", "windows"),
    [
        (QWEN3, {"sliding_window": 4096}, {None: 36}),
        (QWEN3, {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 36}, {None: 36}),
        (QWEN3, {"sliding_window": 4096, "use_sliding_window": True}, {4096: 8, None: 28}),
        (LLAMA3 | {"model_type": "mistral"}, {"sliding_window": 4096}, {4096: 32}),
        (LLAMA3 | {"model_type": "mistral"}, {}, {None: 32}),
        (LLAMA4, {}, {8192: 6, None: 2}),
        (LLAMA4, {"attention_chunk_size": 4096, "no_rope_layers": [1, 0] * 4}, {4096: 4, None: 4}),
    ],
)
def test_windows_are_read_if_the_model_uses_them(
    at: At, data: dict[str, Any], extra: dict[str, Any], windows: dict[int | None, int]
) -> None:
    assert windows_of(read_model("Some-Model", at(data | extra))) == windows


def test_keys_that_are_not_read_are_kept(at: At) -> None:
    text = GEMMA3 | {"attention_dropout": float("inf"), "use_cache": False, "num_nextn_predict_layers": 1}
    text["per_layer_config"] = {"0": {"q_lora_rank": 2}}
    quantized = {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}
    model = read_model("Some-Model", at({"text_config": text, "vision_config": {"depth": 2}, **quantized}))
    assert {name for name, _ in model.unread} == {
        *("vision_config", "text_config.attention_dropout"),
        *("text_config.num_nextn_predict_layers", "quantization_config.quant_method"),
        *("quantization_config.kv_cache_scheme", "per_layer_config.q_lora_rank"),
    }


@pytest.mark.parametrize(
    ("extra", "dense", "experts"), [({"decoder_sparse_step": 2}, 24, 24), ({"mlp_only_layers": [0, 3]}, 2, 46)]
)
def test_layers_without_experts_may_be_anywhere(at: At, extra: dict[str, Any], dense: int, experts: int) -> None:
    model = read_model("Some-Model", at(QWEN3_MOE | extra))
    networks = {network.kind: number for network, number in network_counts(model).items()}
    assert networks == {"dense": dense, "experts": experts}


def test_a_model_with_a_billion_experts_is_refused(at: At) -> None:
    with refuses("num_experts", 10**9):
        read_model("Some-Model", at(QWEN3_MOE | {"num_experts": 10**9}))


def test_leading_dense_layers_are_read(at: At) -> None:
    assert read_model("Some-Model", at(QWEN3_MOE | {"mlp_only_layers": [1, 0]})).moe_first_dense_layers == 2


def test_no_experts_or_no_layer_with_them_is_a_dense_model(at: At) -> None:
    base = at(QWEN2_MOE | {"decoder_sparse_step": 25})
    assert read_model("Some-Model", base).num_moe_experts is None
    (base / "Some-Model" / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"n_routed_experts": None}))
    assert read_model("Some-Model", base).num_moe_experts is None


@pytest.mark.parametrize(
    ("data", "key", "problem"),
    [
        ({}, "num_hidden_layers", "is missing"),
        ({"text_config": {"model_type": "llama"}}, "text_config.num_hidden_layers", "is missing"),
        ({"model_type": "llama"}, "num_hidden_layers", "is missing"),
        (LLAMA3 | {"hidden_size": "4096"}, "hidden_size", "a whole number"),
        (LLAMA3 | {"hidden_size": 4097}, "hidden_size", "divisible by num_attention_heads = 32"),
        (LLAMA3 | {"num_key_value_heads": 5}, "num_key_value_heads", "must divide num_attention_heads = 32"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok", "from 1 to"),
        (config("dory", 6, 256, 512, 8, 99, n_output_layers=0), "loop_start", "not a loop"),
        (config("dory", 600, 256, 512, 8, 99, n_recurrent_loops=2), "num_hidden_layers", "more than 1,000"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types", "num_hidden_layers = 12"),
        (
            config("zamba2", 6, 256, 512, 8, 99, layers_block_type=["mamba"]),
            "layers_block_type",
            "num_hidden_layers = 6",
        ),
        (DEEPSEEK_V3 | {"num_key_value_heads": 8}, "num_key_value_heads", "must equal"),
        (DEEPSEEK_V2_LITE | {"num_experts_per_tok": None}, "num_experts_per_tok", "from 1 to"),
        (LLAMA3 | {"quantization_config": "fp8"}, "quantization_config", "mapping"),
    ],
)
def test_config_that_cannot_be_read_is_refused(
    at: At, error_of: ErrorOf, data: dict[str, Any], key: str, problem: str
) -> None:
    error = error_of(read_model, "Some-Model", at(data))
    assert error.key == key
    assert problem in error.problem
    assert error.file.endswith("Some-Model/config.json")


@pytest.mark.parametrize(
    ("extra", "unread"),
    [
        ({"model_type": "retnet"}, {"model_type": "retnet"}),
        ({"layer_types": ["retention"] * 32}, {"layer_types": "retention"}),
        ({"mlp_bias": True}, {"mlp_bias": "True"}),
    ],
)
def test_what_is_not_known_is_read_as_attention_and_named(
    at: At, extra: dict[str, Any], unread: dict[str, str]
) -> None:
    model = read_model("Some-Model", at(LLAMA3 | extra))
    assert (model.num_layers, model.num_query_groups, mixer_counts(model)) == (32, 8, {attention_of(model): 32})
    assert unread.items() <= dict(model.unread).items()


BLOCKS = [
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 3.0}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
]


def test_experts_with_other_sizes_in_each_layer_have_the_mean_ones(at: At) -> None:
    """NVIDIA/Megatron-LM `examples/hybrid/puzzle`: the widest experts count most."""
    blocks = [{"block_type": "moe", "moe_intermediate_size": 32 * n, "num_experts_per_tok": n} for n in (1, 1, 4)]
    data = config("nemotron_h_puzzle", 5, 256, 512, 8, 99, n_routed_experts=8, moe_latent_size=64)
    data |= {"layers_block_type": ["mamba", "moe", "attention", "moe", "moe"]}
    data |= {"block_configs": [{"block_type": "mamba"}, blocks[0], {"block_type": "attention"}, *blocks[1:]]}
    model = read_model("Some-Model", at(data))
    assert (model.num_layers, model.moe_ffn_hidden_size, model.moe_router_topk) == (5, 64, 3)


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (config("nemotron-nas", 4, 768, None, 8, 99, block_configs=BLOCKS), (3, 1152, 2)),
        (config("cohere2_moe", 4, 256, 512, 8, 99), (4, 512, 8)),
        (config("inkling_text", 4, 256, 96, 8, 99, dense_intermediate_size=512), (4, 512, 8)),
        (config("llama4_text", 4, 256, 96, 8, 99, intermediate_size_mlp=512), (4, 512, 8)),
        (config("ernie4_5_vl_moe_text", 4, 256, 512, 8, 99, num_experts=[64, 32]), (4, 512, 4)),
        (config("qwen2", 4, 256, 512, 8, 99, sliding_window=0, head_dim=0, num_key_value_heads=8), (4, 512, 8)),
    ],
)
def test_sizes_follow_the_families(at: At, data: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    model = read_model("Some-Model", at(data))
    assert (model.num_layers, model.ffn_hidden_size, model.num_query_groups) == sizes
    widths = {"cohere2_moe": 512, "inkling_text": 96, "llama4_text": 96, "ernie4_5_vl_moe_text": 1536}
    assert model.moe_ffn_hidden_size == widths.get(data["model_type"])
    assert model.num_moe_experts != 32


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (config("gemma4_text", 6, 256, 512, 8, 99, attention_k_eq_v=True, num_global_key_value_heads=2), 2),
        (config("gemma4_text", 12, 256, 512, 8, 99, num_kv_shared_layers=6), 4),
        (config("llama", 2, 256, 512, 8, 99, per_layer_config={"01": {"num_attention_heads": 4, "rank": 2}}), 2),
        (config("glm_moe_dsa", 9, 6144, 12288, 64, 99, index_topk_freq=4), 2),
        (config("laguna", 2, 256, 512, 8, 99, num_attention_heads_per_layer=[8, 4]), 2),
        (config("longcat_flash", 2, 256, 512, 8, 99), 1),
    ],
)
def test_attention_with_other_sizes_is_a_kind_of_its_own(at: At, data: dict[str, Any], kinds: int) -> None:
    model = read_model("Some-Model", at(data))
    assert len(attention_by_size(model)) == kinds


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (config("gemma2", 2, 256, 512, 8, 99), 2),
        (config("gemma2", 2, 256, 512, 8, 99, final_logit_softcapping=None), 0),
        (config("gemma4_text", 6, 256, 512, 8, 99), 0),
        (config("gemma4_text", 6, 256, 512, 8, 99, final_logit_softcapping=30.0), 2),
        (config("beam", 2, 256, 512, 8, 99), 4),
    ],
)
def test_a_soft_cap_of_logits_is_read_with_the_default_of_its_family(at: At, data: dict[str, Any], kept: int) -> None:
    model = read_model("Some-Model", at(data))
    assert (model.logit_cap_bytes, dict(model.unread).get("final_logit_softcapping")) == (kept, None)


@pytest.mark.parametrize(
    ("data", "outputs"),
    [
        (config("deepseek_v4", 2, 256, 512, 8, 99), 24),
        (config("hy_v4", 2, 256, 512, 8, 99), 8),
        (config("qwen4_exp_text", 2, 256, 512, 8, 99, hc_count=2, hc_lowrank=16), 35),
        (config("llama", 2, 256, 512, 8, 99), 0),
    ],
)
def test_residual_streams_have_weights(at: At, data: dict[str, Any], outputs: int) -> None:
    model = read_model("Some-Model", at(data))
    assert model.residual_weights == model.residual_streams * 256 * outputs


def test_a_window_may_have_a_latent_of_its_own(at: At) -> None:
    own = {"02": {"kv_lora_rank": 1024, "qk_nope_head_dim": 192}}
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    model = read_model(
        "Some-Model",
        at(
            DEEPSEEK_V3
            | {"model_type": "dots3_note_text", "num_hidden_layers": 3}
            | {"layer_types": kinds, "per_layer_config": own}
        ),
    )
    assert {
        (each.latent_rank, each.nope_dim) for each in attention_counts(model) if isinstance(each, LatentAttention)
    } == {(512, 128), (1024, 192)}


def test_later_blocks_of_zamba2_run_the_first_ones_again(at: At) -> None:
    kinds = {"layers_block_type": ["mamba", "hybrid"] * 3, "num_mem_blocks": 2}
    model = read_model("Some-Model", at(config("zamba2", 6, 256, 512, 8, 99, **kinds)))
    assert [each.repeats for each in model.layers if isinstance(each.mixer, Attention)] == [False, False, True]
    assert not any(each.repeats for each in model.layers if not isinstance(each.mixer, Attention))


LOOP = {"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 3}


@pytest.mark.parametrize(
    ("data", "runs"),
    [
        (config("inkling2_loop_text", 4, 256, 512, 8, 99, **LOOP), "01212123"),
        (config("dory", 6, 256, 512, 8, 99, n_input_layers=2, n_output_layers=2), "01232345"),
        (config("hrm_text", 1, 256, 512, 8, 99, L_cycles=2), "001001"),
        (config("hrm_text", 12, 256, 512, 8, 99, L_cycles=2, num_layers_per_stack=2), "010123010123"),
    ],
)
def test_a_layer_of_a_loop_runs_again(at: At, data: dict[str, Any], runs: str) -> None:
    model = read_model("Some-Model", at(data))
    assert [each.repeats for each in model.layers] == [number in runs[:place] for place, number in enumerate(runs)]
    assert (model.num_layers, len(own_layers(model))) == (len(runs), len({*runs}))


def test_a_misspelled_name_is_answered_with_the_nearest(error_of: ErrorOf) -> None:
    error = error_of(read_model, "deepseek-ai/DeepSeek-V3.7", Path())
    assert "known here" in error.problem
    assert "did you mean deepseek-ai/DeepSeek-V3" in error.fix
    assert error_of(read_model, "./Some-Model", Path("/nowhere")).problem == "does not exist"


QWEN25_VL = config("qwen2_5_vl", 28, 3584, 18944, 28, 152064, num_key_value_heads=4) | {
    "vision_config": {"hidden_size": 1280, "spatial_merge_size": 2}
}
QWEN2_VL = QWEN25_VL | {"model_type": "qwen2_vl", "vision_config": {"hidden_size": 3584}}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "text_config": QWEN3 | {"model_type": "qwen3_vl_text"},
    "vision_config": {"out_hidden_size": 4096},
}
"""Other sizes of towers are the defaults of their families."""


def model_in(folder: Path, data: Mapping[str, Any], **preprocessor: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(data))
    if preprocessor:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return read_model(str(folder), folder)


def test_vision_towers_are_read(tmp_path: Path) -> None:
    model = model_in(tmp_path, QWEN25_VL, min_pixels=3136, max_pixels=12845056)
    assert model.vision == VISION
    assert (model.num_layers, model.add_qkv_bias) == (28, True)
    older = model_in(tmp_path, QWEN2_VL).vision
    assert (older.hidden_size, older.ffn_hidden_size, older.output_size) == (1280, 5120, 3584)
    assert (older.full_layers, older.window_size, older.gated_linear_unit) == (32, 0, False)
    assert model_in(tmp_path, QWEN3).vision is None
    assert model_in(tmp_path, QWEN2_VL | {"vision_config": {}}).vision == older


def test_sizes_of_images_are_those_of_the_processor(tmp_path: Path) -> None:
    assert getattr(model_in(tmp_path, QWEN25_VL).vision, "max_pixels", None) == 28 * 28 * 1280
    model = model_in(tmp_path, QWEN3_VL, size={"longest_edge": 16777216, "shortest_edge": 65536})
    assert (model.vision.min_pixels, model.vision.max_pixels, model.vision.mergers) == (65536, 16777216, 4)
    assert model.vision.tokens(1280, 704) == 40 * 22
    assert model.qk_layernorm
    assert read_model("Qwen/Qwen3-VL-8B-Instruct-FP8", tmp_path).vision == model.vision


def test_towers_without_mergers_are_read(tmp_path: Path) -> None:
    """Of Gemma 4 31B's 31.27e9 weights, 30.70e9 are those of its text model."""
    section = {"model_type": "gemma4_vision", "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304}
    found = model_in(tmp_path, QWEN3 | {"vision_config": section | {"num_attention_heads": 16}}).vision
    assert found == read_model("google/gemma-4-31B-it", tmp_path).vision
    assert (found.mergers, found.gated_linear_unit, found.max_tokens) == (0, True, 280)
    assert VisionTower(vision=found).weights == pytest.approx(0.55e9, rel=0.01)
    fixed = read_model("google/gemma-3-27b-it", tmp_path).vision
    assert [fixed.tokens(*size) for size in ((200, 200), (4000, 4000))] == [256, 256]


def test_an_invalid_tower_names_its_key(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        model_in(tmp_path, QWEN25_VL | {"vision_config": {"depth": 0, "hidden_size": 8}})
    assert any("vision_config" in each.key for each in raised.value.problems)
    with pytest.raises(SpecError) as raised:
        model_in(tmp_path, QWEN25_VL, min_pixels="many")
    assert "min_pixels" in raised.value.key


@pytest.mark.parametrize(
    ("kind", "expected"), [("fp8_e4m3", "fp8"), ("fp4", "mxfp4"), ("fp6_e3m2", None), (["fp4", "fp8_e4m3"], "nvfp4")]
)
def test_the_format_of_a_checkpoint_of_quark_is_that_of_its_weights(kind: Any, expected: str | None) -> None:
    weight = [{"dtype": each} for each in kind] if isinstance(kind, list) else {"dtype": kind}
    stored = {"quant_method": "quark", "global_quant_config": {"weight": weight}}
    assert format_of_weights({"quantization_config": stored}) == expected


@pytest.mark.parametrize(("size", "expected"), [(16, "nvfp4"), (32, "mxfp4")])
def test_floats_of_4_bits_are_mxfp4_if_32_share_a_scale(size: int, expected: str) -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": size}
    assert format_of_weights({"quantization_config": {"config_groups": {"all": {"weights": weights}}}}) == expected


gguf = pytest.importorskip("gguf", reason="pip install gguf to make a header")


def header(folder: Path, arch: str, sizes: dict[str, Any], tensors: tuple[str, ...] = ()) -> str:
    import numpy as np

    file = folder / f"{arch}.gguf"
    writer = gguf.GGUFWriter(str(file), arch)
    for name, size in sizes.items():
        add = writer.add_array if isinstance(size, list) else writer.add_uint32
        add(f"{arch}.{name}", size)
    for name in tensors:
        writer.add_tensor(name, np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


DENSE = {
    "block_count": 4,
    "embedding_length": 256,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "vocab_size": 1000,
    "context_length": 4096,
}


def test_a_dense_model_with_tied_tables_and_biases(tmp_path: Path) -> None:
    file = header(tmp_path, "qwen2", DENSE, ("token_embd.weight", "blk.0.ffn_gate.weight", "blk.0.attn_q.bias"))
    found = gguf_shape(file)
    assert (found["num_layers"], found["kv_channels"], found["num_query_groups"]) == (4, 32, 2)
    assert (found["untie_embeddings_and_output_weights"], found["add_qkv_bias"]) == (False, True)
    assert context_length(file) == 4096
    assert "num_moe_experts" not in found


STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16, "ssm.time_step_rank": 8}
WINDOW, SECOND = {"attention.sliding_window": 128}, {"attention.head_count_kv": [0, 2, 0, 0]}
MIXED = ["Mamba2", "2", "-", "-"]


@pytest.mark.parametrize(
    ("arch", "sizes", "expected"),
    [
        ("deci", {"attention.head_count_kv": [2, 4, 0, 2]}, ["2", "4", "-", "2"]),
        ("gemma2", WINDOW, ["2 128", "2", "2 128", "2"]),
        ("mimo2", WINDOW | {"attention.sliding_window_pattern": [True, True, False, False]}, 2 * ["2 128"] + 2 * ["2"]),
        ("llama", WINDOW, ["2", "2", "2", "2"]),
        ("glm4moe", {"nextn_predict_layers": 1}, ["2", "2", "2"]),
        ("qwen3next", STATES | {"ssm.group_count": 4}, [*["GatedDeltaNet"] * 3, "2"]),
        ("granitehybrid", STATES | SECOND | {"ssm.group_count": 1}, ["Mamba2", "2", "Mamba2", "Mamba2"]),
        ("falcon-h1", STATES | {"ssm.group_count": 1}, ["Mamba2", "2"] * 4),
        ("nemotron_h", STATES | SECOND | {"ssm.group_count": 1, "feed_forward_length": [0, 0, 8, 8]}, MIXED),
        ("jamba", STATES | SECOND, ["Mamba", "2", "Mamba", "Mamba"]),
        ("lfm2", {"shortconv.l_cache": 3, **SECOND}, ["ShortConvolution", "2", *["ShortConvolution"] * 2]),
    ],
)
def test_layers_of_a_gguf_file_differ(tmp_path: Path, arch: str, sizes: dict[str, Any], expected: list[str]) -> None:
    model = catalogue.read(Path(header(tmp_path, arch, DENSE | sizes, ("output.weight",))))
    found = []
    for each in layers_of(model):
        mixer = each.mixer
        name = "-" if mixer is None else type(mixer).__name__
        found.append(f"{mixer.groups} {mixer.window or ''}".strip() if isinstance(mixer, Attention) else name)
    assert found == expected
    assert dict(model.unread) == ({"attention.sliding_window": "128"} if arch == "llama" else {})


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    sizes = {"expert_count": 16, "expert_used_count": 4, "expert_feed_forward_length": 128}
    shared = {"expert_shared_count": 2, "leading_dense_block_count": 1}
    found = gguf_shape(header(tmp_path, "deepseek2moe", DENSE | sizes | shared, ("blk.1.ffn_gate_exps.weight",)))
    assert found["num_moe_experts"] == 16
    assert (found["moe_router_topk"], found["moe_ffn_hidden_size"], found["moe_first_dense_layers"]) == (4, 128, 1)
    assert found["moe_shared_expert_intermediate_size"] == 256
    assert found["gated_linear_unit"]


def test_latent_attention(tmp_path: Path) -> None:
    latent = {
        "attention.kv_lora_rank": 64,
        "attention.q_lora_rank": 96,
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "attention.key_length": 80,
        "rope.dimension_count": 16,
        "attention.head_count_kv": 1,
    }
    found = gguf_shape(header(tmp_path, "deepseek2", DENSE | latent, ("output.weight",)))
    assert found["multi_latent_attention"]
    assert (found["kv_lora_rank"], found["q_lora_rank"]) == (64, 96)
    assert (found["qk_head_dim"], found["qk_pos_emb_head_dim"], found["v_head_dim"]) == (32, 16, 32)
    assert found["num_query_groups"] == 8


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    sizes = {name: size for name, size in DENSE.items() if name != "block_count"}
    with pytest.raises(SpecError, match=r"has no llama\.block_count"):
        gguf_shape(header(tmp_path, "llama", sizes))
    with pytest.raises(SpecError, match="so no layers"):
        gguf_shape(header(tmp_path, "glm4moe", DENSE | {"nextn_predict_layers": 4}))


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<IIQ", 9, 8, 3_000_000) + (struct.pack("<Q", 1) + b"a") * 9,
        struct.pack("<IIQ", 9, 0, 2**60),
        struct.pack("<IIQ", 9, 9, 1) * 1_000,
        struct.pack("<IQ", 8, 2**62),
    ],
    ids=["strings", "bytes", "nested", "text"],
)
def test_a_gguf_header_without_end_is_refused_before_it_is_read(tmp_path: Path, value: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + value)
    with refuses("model"):
        gguf_shape(str(file))


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("amd/Qwen3-Coder-480B-A35B-Instruct-MXFP4", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "mxfp4"),
        ("amd/DeepSeek-R1-0528-MXFP4-v2", "deepseek-ai/DeepSeek-R1", "mxfp4"),
        ("amd/Kimi-K2.5-MXFP4-AttnFP8", "moonshotai/Kimi-K2.5", "mxfp4"),
        ("MiniMaxAI/MiniMax-M3-MXFP8", "MiniMaxAI/MiniMax-M3", "mxfp8"),
        ("Inferact/Muse-Glimmer-30B-NVFP4-W4A4", "meta-models/Muse-Glimmer-30B", "nvfp4"),
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-NVFP4-QAD", "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL", "nvfp4"),
        ("poolside/Laguna-XS-2.1-FP8", "poolside/Laguna-XS-2.1", "fp8"),
        ("google/gemma-4-31B-it-qat-w4a16-ct", "google/gemma-4-31B", "int4"),
        ("unsloth/gpt-oss-120b-MXFP4", "openai/gpt-oss-120b", "int4"),
        ("deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2", None),
    ],
)
def test_words_after_a_format_do_not_hide_the_model(name: str, shape: str, stored: str | None) -> None:
    found = public.find_public(name)
    assert (public.public_name(name), found and found[1]) == (shape, stored)


def test_an_entry_that_is_read_alone_is_that_of_the_whole_table() -> None:
    for name, config in public.public_models().items():
        found = public.find_public(name)
        assert found is not None
        assert {key: value for key, value in found[0].items() if key in config} == config
    (first, *_others) = yaml.load_all(Path(keys.__file__).with_name("families.yaml").read_text("utf-8"), SafeLoader)
    assert dict(keys.FAMILIES) == first
