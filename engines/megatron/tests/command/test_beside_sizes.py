"""An exported command trains the model that is named, not one of its sizes."""

from typing import Any

import pytest
from flagcore_megatron.command.beside_sizes import arguments_beside_sizes
from flagcore_megatron.program.arguments import release_table
from flagcore_models.catalogue import of_keys, public_model

LLAMA = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rope_theta": 250000.0,
    "rms_norm_eps": 1e-06,
}


def effective(model: Any, release: str | None = None) -> tuple[dict[str, Any], str]:
    """The values of the arguments, and what lacks."""
    words, lacks = arguments_beside_sizes(model, release)
    assert release_table(release).parse(words)[1] == []
    return dict(release_table(release).effective(words)), lacks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", {"rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 8.0}),
        ("Qwen/Qwen2.5-7B-Instruct", {"rotary_base": 1000000, "layernorm_epsilon": 1e-06}),
        ("Qwen/Qwen3-30B-A3B", {"rotary_base": 1000000}),
        ("Qwen/Qwen3.5-35B-A3B", {"rotary_percent": 0.25, "moe_shared_expert_gate": True}),
        (
            "deepseek-ai/DeepSeek-V3",
            {
                "rotary_scaling_factor": 40.0,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_router_score_function": "sigmoid",
                "qk_layernorm": True,
                "mscale_all_dim": 1.0,
            },
        ),
        ("zai-org/GLM-5.2", {"rotary_base": 8000000, "moe_router_enable_expert_bias": True}),
    ],
)
def test_public_models_get_the_values_of_their_config(name: str, expected: dict[str, Any]) -> None:
    found, lacks = effective(public_model(name))
    assert {key: found.get(key) for key in expected} == expected
    assert (lacks, "moe_router_pre_softmax" in found) == ("", False)


@pytest.mark.parametrize(
    ("keys", "expected", "lacking"),
    [
        ({}, {"rotary_base": 250000, "layernorm_epsilon": 1e-06}, ()),
        ({"rope_scaling": LLAMA | {"original_max_position_embeddings": 8192}}, {"rope_scaling_factor": 4.0}, ()),
        ({"rope_scaling": LLAMA | {"high_freq_factor": 2.0}}, {}, ("high_freq_factor",)),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, {}, ("rope_scaling",)),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {}, ("rope_scaling",)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7, "rope_type": "default"}}, {"rotary_base": 7}, ()),
        ({"rope_theta": None}, {}, ("rope_theta",)),
        ({"hidden_act": "silu"}, {}, ()),
        ({"hidden_act": "gelu", "mlp_bias": True}, {}, ("hidden_act", "mlp_bias")),
    ],
)
def test_values_of_a_config_are_arguments_or_named(keys: Any, expected: Any, lacking: tuple[str, ...]) -> None:
    found, lacks = effective(of_keys(SHAPE | keys, "own"))
    assert {key: found.get(key) for key in expected} == expected
    assert all(key in lacks for key in lacking)
    assert bool(lacks) == bool(lacking)


def test_routers_without_normalized_weights_choose_after_the_softmax() -> None:
    keys = SHAPE | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert effective(of_keys(keys, "own"))[0]["moe_router_pre_softmax"] is True
    assert "moe_router_pre_softmax" not in effective(of_keys(keys | {"norm_topk_prob": True}, "own"))[0]


def test_what_is_not_known_is_said() -> None:
    for name in (
        "google/gemma-3-4b-pt",
        "Qwen/Qwen2.5-72B-Instruct",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "openai/gpt-oss-20b",
    ):
        assert name in effective(public_model(name))[1]
    found, lacks = effective(public_model("Qwen/Qwen3.5-35B-A3B"), "0.14.0")
    assert "--moe-shared-expert-gate" in lacks
    assert "moe_shared_expert_gate" not in found
