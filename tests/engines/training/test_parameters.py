"""Parameters of a rank equal those of the modules that megatron-core builds for it."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from flagcore.engines.training import stages as pipeline
from flagcore.engines.training.memory.training import split_parameters, stage_of_rank
from flagcore.engines.training.stages import stage_parameters
from tests.engines.training.ranks import (
    DP,
    EMBEDDING,
    EP,
    ETP,
    FIRST,
    LAST,
    LETTERS,
    LOSS,
    PP,
    SP,
    TP,
    VP,
    of_megatron,
    of_physics,
    run_ranks,
    world,
)

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")

SMALL = {"hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 8, "vocab_size": 1000, "num_layers": 8}
ROUTED = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "qk_layernorm": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {**SMALL, "num_query_groups": 4},
    "Qwen2.5 7B": {**SMALL, "num_query_groups": 4, "add_qkv_bias": True},
    "Qwen3 4B": {
        **SMALL,
        "num_query_groups": 4,
        "kv_channels": 16,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": False,
    },
    "GPT-3": {**SMALL, "gated_linear_unit": False, "untie_embeddings_and_output_weights": False},
    "Qwen3 30B A3B": {**SMALL, **ROUTED, "num_query_groups": 4, "kv_channels": 16, "qk_layernorm": True},
    "Qwen1.5 MoE": {**SMALL, **ROUTED, "moe_shared_expert_intermediate_size": 96, "add_qkv_bias": True},
    "DeepSeek-V3": {
        **SMALL,
        **ROUTED,
        **LATENT,
        "q_lora_rank": 40,
        "moe_shared_expert_intermediate_size": 48,
        "moe_first_dense_layers": 3,
        "mtp_num_layers": 1,
    },
    "MiniCPM3": {
        **SMALL,
        **LATENT,
        "q_lora_rank": 40,
        "untie_embeddings_and_output_weights": False,
        "mtp_num_layers": 1,
    },
}
"""Structures of published models, narrow and with eight layers."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data": {DP: 4, EP: 2},
    "tensor 2": {TP: 2, SP: True},
    "tensor 8": {TP: 8, SP: True, ETP: 1, EP: 4},
    "experts": {DP: 8, EP: 8},
    "expert tensor": {TP: 4, SP: True, ETP: 2, EP: 2},
    "tensor and experts": {TP: 2, SP: True, DP: 4, EP: 4, ETP: 1},
    "pipeline 2": {PP: 2},
    "pipeline 4": {PP: 4, TP: 2, SP: True},
    "pipeline 8": {PP: 8, DP: 2, EP: 2},
    "interleaved": {PP: 2, VP: 2},
    "interleaved by layers": {PP: 4, VP: 2, TP: 2, SP: True},
    "short first stage": {PP: 4, FIRST: 2},
    "short ends": {PP: 4, FIRST: 1, LAST: 3},
    "long last stage": {PP: 3, LAST: 4, DP: 2, EP: 2},
    "short ends, interleaved": {PP: 3, VP: 2, FIRST: 2, LAST: 2},
    "embedding and loss count": {PP: 5, EMBEDDING: True, LOSS: True},
    "loss counts, interleaved": {PP: 3, VP: 3, LOSS: True},
    "letters": {PP: 4, LETTERS: "Ett|tt|ttt|tmL"},
    "letters, interleaved with empty stages": {PP: 4, VP: 2, LETTERS: "E|tt|tt|t||t|tt|mL"},
}


def counted(knobs: dict[str, Any], model: dict[str, Any]) -> dict[str, Any] | None:
    """The knobs as they fit a model; None where they do not."""
    knobs = dict(knobs)
    if "num_moe_experts" not in model:
        knobs = {name: value for name, value in knobs.items() if name not in (EP, ETP)}
    if LETTERS in knobs and not model.get("mtp_num_layers"):
        knobs[LETTERS] = knobs[LETTERS].replace("m", "")
    if knobs.get(TP, 1) > model.get("num_query_groups", 8) and model.get("add_qkv_bias"):
        return None
    return knobs


WHOLE = "DeepSeek-V3"
"""The model with all layouts. Each of the others has a third of them."""


def jobs() -> dict[str, dict[str, Any]]:
    found = {}
    for number, (name, model) in enumerate(MODELS.items()):
        for place, (words, knobs) in enumerate(LAYOUTS.items()):
            fitting = counted(knobs, model)
            if fitting is None or (name != WHOLE and (place + number) % 3):
                continue
            ranks = world(fitting)
            for rank in sorted({(len(name) * 7 + len(words)) % ranks, ranks - 1}):
                found[f"{name}: {words}, rank {rank}"] = {"model": model, "rank": rank, "knobs": fitting}
    return found


JOBS = jobs()


def counted_by_physics(model: dict[str, Any], rank: int, knobs: dict[str, Any]) -> float:
    train, split = of_physics(model, knobs)
    where = pipeline.stage(train.model, split, stage_of_rank(split, rank), train.options)
    return float(sum(np.sum(part) for part in split_parameters(stage_parameters(train, split, where))))


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("parameters")
    return dict(zip(JOBS, run_ranks(folder, [of_megatron(**job) for job in JOBS.values()]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_a_rank_are_those_that_megatron_builds(counts: dict[str, int], model: str) -> None:
    mine = [name for name in JOBS if name.startswith(f"{model}: ")]
    assert {name: counted_by_physics(**JOBS[name]) for name in mine} == {name: counts[name] for name in mine}
