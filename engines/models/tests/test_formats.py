"""The formats of modules in checkpoints, by the rules of the tools that write them."""

import json
from pathlib import Path
from typing import Any

import pytest
from flagcore_models.catalogue import of_keys, public_model
from flagcore_models.formats import HEAD, MTP, Share, config_of, format_of_weights, quantization_of, shares
from flagcore_models.public import find_public, quant_method

DENSE = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 192}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024}
EXPERTS = DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
INT4, NVFP4, FP8, WIDE = 0.53, 0.5625, 1.0, 2.0
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
FP8_GROUP = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
NVFP4_GROUP = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
ALL = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}
LAYERS = {"mlp": {"quant_algo": "NVFP4"}, "self_attn": {"quant_algo": "FP8"}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}
INT4_WEIGHT = {"weight": {"dtype": "int4"}}
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}
AO = {"_default": {"_type": "Int8WeightOnlyConfig", "_data": {}}, r"re:model\.layers\..+\.mlp\..+": None}
AO["model.layers.0.mlp.down_proj"] = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}


def groups(*sections: dict[str, Any], **keys: Any) -> dict[str, Any]:
    named = {f"group_{number}": section for number, section in enumerate(sections)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **keys}


def torchao(configuration: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": configuration}}


def found(section: dict[str, Any], config: dict[str, Any] = DENSE) -> dict[str, Share]:
    return dict(shares(of_keys(config, "model"), section, "fp8"))


@pytest.mark.parametrize(
    ("section", "attention", "dense"),
    [
        (GPTQ | {"dynamic": {"-:.*attn.*": {}}}, WIDE, INT4),
        (GPTQ | {"dynamic": {"+:.*attn.*": {"bits": 8}, "-:.*self_attn.*": {}}}, 1.0, INT4),
        (GPTQ | {"dynamic": {r".*\.o_proj": {"group_size": 32}}}, 0.75 * INT4 + 0.25 * 0.5625, INT4),
        (GPTQ | {"dynamic": {r"-:.*layers\.0\.": {}}}, 0.25 * WIDE + 0.75 * INT4, 0.25 * WIDE + 0.75 * INT4),
        (GPTQ | {"dynamic": {"-:attn": {}}}, INT4, INT4),  # the beginning of a name
        (GPTQ | {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]}, WIDE, INT4),
        (ROUND | {"extra_config": {"self_attn": {"bits": 16}}}, WIDE, INT4),
        (ROUND | {"extra_config": {r".*o_proj$|self_attn\.[qkv]": {"bits": 8}}}, 1.0, INT4),
        (ROUND | {"group_size": 32, "data_type": "mx_fp"}, 17 / 32, 17 / 32),
        (groups(ALL | {"targets": ["re:.*mlp.*"]}, ignore=["lm_head"]), WIDE, INT4),
        (groups(NVFP4_GROUP, FP8_GROUP), FP8, NVFP4),
        (groups(FP8_GROUP, NVFP4_GROUP), FP8, NVFP4),
        (groups(ALL, FP8_GROUP), FP8, INT4),  # names come before classes
        (groups(ALL, ignore=["re:.*self_attn.*"]), WIDE, INT4),
        (MIXED | {"quantized_layers": LAYERS}, FP8, NVFP4),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}, WIDE, FP8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["mlp"]}, 1.0, WIDE),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["attn"]}, WIDE, INT4),  # any part of a name
        ({"quant_method": "fp8", "modules_to_not_convert": ["attn"]}, FP8, FP8),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.1.mlp"]}, FP8, 0.75 * FP8 + 0.25 * WIDE),
        (QUARK | {"layer_quant_config": {"*mlp*": INT4_WEIGHT}, "exclude": ["*self_attn*"]}, WIDE, INT4),
        (torchao({"_type": "Float8WeightOnlyConfig"}), FP8, FP8),
        (torchao({"_type": "FqnToConfig", "_data": {"fqn_to_config": AO}}), 1.0, WIDE - (WIDE - 0.5625) / 12),
        ({"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {"nbits": 4, "group_size": 64}}}, 1.640625, WIDE),
        ({"quant_method": "eetq", "modules_to_not_convert": ["mlp"]}, 1.0, WIDE),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]}, WIDE, FP8),
        (MLX | {"model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8}}, 0.5625, 0.5625 + 0.5 / 12),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:(a+)+$": {}, "-:[": {}}}, INT4, INT4),
    ],
)
def test_each_module_has_the_format_of_the_first_rule_that_matches(
    section: dict[str, Any], attention: float, dense: float
) -> None:
    of = found(section)
    assert [of["attention"].bytes, of["dense"].bytes] == pytest.approx([attention, dense], abs=1e-9)


@pytest.mark.parametrize(
    ("section", "head"),
    [
        (GPTQ | {"dynamic": {"lm_head": {}}}, WIDE),
        (GPTQ | {"lm_head": True}, INT4),
        (groups(ALL), WIDE),
        (groups(ALL | {"targets": ["Linear", "re:.*lm_head"]}), INT4),
        (ROUND | {"extra_config": {"lm_head": {"bits": 8}}}, 1.0),
        (MLX, 0.5625),
    ],
)
def test_the_head_is_quantized_only_where_a_rule_says_so(section: dict[str, Any], head: float) -> None:
    assert found(section)[HEAD].bytes == head


def test_routed_experts_and_drafts_have_rules_of_their_own() -> None:
    of = found(GPTQ | {"dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}}}, EXPERTS)
    assert {group: each.bytes for group, each in of.items()} == {
        "attention": WIDE, "experts": INT4, MTP: WIDE, HEAD: WIDE
    }  # fmt: skip
    names = {f"model.layers.{layer}.mlp.experts.{expert}": {"bits": 8} for layer in range(2) for expert in range(8)}
    assert found(ROUND | {"extra_config": names}, EXPERTS)["experts"].bytes == (1.0 + INT4) / 2


def test_formats_beside_a_config_count_if_it_names_none(tmp_path: Path) -> None:
    side = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert format_of_weights(config_of(tmp_path)) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    assert (format_of_weights(config_of(tmp_path)), quant_method(str(tmp_path))) == ("fp8", "modelopt")
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"quantization_config": GPTQ}))
    assert format_of_weights(config_of(tmp_path)) == "int4"


def test_qwens_own_gptq_checkpoints_have_attention_in_16_bits() -> None:
    name = "Qwen/Qwen3.5-27B-GPTQ-Int4"
    config, form = find_public(name) or ({}, None)
    model = public_model(name)
    assert model is not None
    of = shares(model, quantization_of(config), "int4")
    assert (form, of["attention"].bytes, of["dense"].bytes) == ("int4", WIDE, INT4)
    assert quantization_of((find_public("Qwen/Qwen3.5-27B-AWQ") or ({}, None))[0]) == {}
