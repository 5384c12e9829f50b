"""Parameters and memory of a rank equal what megatron-core builds and allocates for it on a simulated allocator.

The simulated allocator counts the tensors that live while megatron-core's own code trains two steps (`meta_ranks.py`).
On an accelerator it is exact but for routing, which is never quite even.
"""

import dataclasses
from typing import Any

import pytest
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.states import split_parameters
from flagcore_training.weights import stage_parameters

from engines.megatron.tests.trial.trial_jobs import (
    DP,
    EMBEDDING,
    EP,
    ETP,
    FIRST,
    LAST,
    LETTERS,
    LOSS,
    MICRO,
    NEEDS_MEGATRON,
    PP,
    SHARDED,
    SP,
    TP,
    VP,
    of_megatron,
    of_physics,
    run_ranks,
    world,
)
from engines.training.tests.simulation import rank_memory, stage_of_rank

pytestmark = [pytest.mark.slow, pytest.mark.together("training")]

HEADS = {"num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128}
DENSE: dict[str, Any] = {**HEADS, "num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "vocab_size": 32768}
LONG = {**DENSE, "num_layers": 8}
HALF = {"num_layers": 2, "hidden_size": 2048, "num_attention_heads": 16}
ROUTED = {"num_moe_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 1024}
EXPERTS = {**DENSE, **HALF, **ROUTED, "num_query_groups": 4, "qk_layernorm": True}
FEW_EXPERTS = {**EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 7168}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 2048, "moe_first_dense_layers": 1, "qk_layernorm": False}
WIDTHS = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
LATENT = {**HALF, **WIDTHS, "multi_latent_attention": True, "qk_layernorm": True}
LATENT |= {"ffn_hidden_size": 6144, "vocab_size": DENSE["vocab_size"]}
DEEP = {**LATENT, **{name: SHARED[name] for name in SHARED if name.startswith(("num_moe", "moe"))}, "mtp_num_layers": 1}
GPT = {**DENSE, "gated_linear_unit": False, "untie_embeddings_and_output_weights": False, "num_query_groups": 32}


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


SLIM, TWO, WIDE = {**DENSE, "num_layers": 2, "vocab_size": 4096}, {"mtp_num_layers": 1}, {MICRO: 4}
TP2, EP2 = {TP: 2, SP: True}, {DP: 2, EP: 2, ETP: 1}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "plain": (DENSE, 0, {}),
    "sequence": (DENSE, 0, {TP: 8, SP: True}),
    "sharded optimizer": (DENSE, 0, {DP: 8, SHARDED: True}),
    "last of four stages": (LONG, 6, {PP: 4, **TP2}),
    "short first stage": (LONG, 1, {PP: 4, FIRST: 2}),
    "interleaved, first": (LONG, 0, {PP: 4, VP: 2}),
    "interleaved, last": (LONG, 3, {PP: 4, VP: 2}),
    "uniform recompute on a stage": (LONG, 1, {PP: 4, **full("uniform", 1)}),
    "block recompute": (DENSE, 0, full("block", 3)),
    "recompute of norms and the FFN": (DENSE, 0, {**TP2, **selective("mlp", "layernorm", "core_attn")}),
    "no gate, tied, last stage": (GPT, 1, {PP: 2}),
    "one expert a rank": (FEW_EXPERTS, 3, {DP: 8, EP: 8, ETP: 1}),
    "tensor and experts": (FEW_EXPERTS, 0, {**TP2, DP: 2, EP: 4, ETP: 1, SHARDED: True}),
    "whole experts beside split layers": (EXPERTS, 0, {**TP2, DP: 4, ETP: 1, SHARDED: True}),
    "experts, interleaved": ({**EXPERTS, "num_layers": 4}, 0, {PP: 2, VP: 2, **EP2}),
    "experts, recompute on a stage": (SHARED, 2, {PP: 2, **EP2, **full("uniform", 1)}),
    "recompute of all experts": (SHARED, 0, {**EP2, **selective("moe")}),
    "latent attention, sequence": (LATENT, 0, TP2),
    "latent attention, recompute": (LATENT, 0, selective("mla_up_proj")),
    "two tokens on the last stage": (DEEP, 2, {PP: 2, **EP2}),
    "three tokens": ({**DENSE, "num_layers": 2, "mtp_num_layers": 2}, 0, TP2),
    "layers outweigh the loss, recompute of the FFN": (SLIM, 0, {**WIDE, **selective("mlp")}),
    "two tokens, block recompute": ({**SLIM, **TWO}, 0, {**WIDE, **TP2, **full("block", 1)}),
    "two tokens, experts, uniform recompute": (DEEP, 0, {**WIDE, **EP2, **full("uniform", 1)}),
    "wide split experts": (FEW_EXPERTS, 0, {**WIDE, **TP2, DP: 8, EP: 8, ETP: 2}),
    "latent attention, recompute, experts": (DEEP, 0, {**WIDE, **EP2, **selective("mla_up_proj", "layernorm")}),
}
SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "seven, recompute": ({**DENSE, "num_layers": 7}, {PP: 4, LETTERS: "Ett|tt|tt|tL", **full("block", 1)}, (0, 3)),
    "seven layers, interleaved": ({**DENSE, "num_layers": 7}, {PP: 2, VP: 2, LETTERS: "Ett|tt|tt|tL"}, (0, 1)),
    "experts and a dense layer": ({**SHARED, "num_layers": 5}, {PP: 3, LETTERS: "Ett|tt|tL", **EP2}, (1, 2)),
    "two tokens and no layer at the loss": ({**DEEP, "num_layers": 5}, {PP: 3, LETTERS: "Ett|ttt|mL", **EP2}, (1, 2)),
    "two tokens before the loss": ({**DEEP, "num_layers": 5}, {PP: 4, LETTERS: "Ett|tt|tm|L", **EP2}, (0, 1, 2, 3)),
    "two tokens alone": ({**DENSE, "num_layers": 5, **TWO}, {PP: 4, LETTERS: "Ett|ttt|m|L"}, (0, 1, 2, 3)),
}
"""Layouts as they are derived, and stages of which no other covers the memory."""
CASES |= {
    f"{name}, stage {stage}": (model, stage * knobs.get(DP, 1), knobs)
    for name, (model, knobs, stages) in SPLITS.items()
    for stage in stages
}


REPEATS = {
    *("interleaved, first", "uniform recompute on a stage", "wide split experts"),
    *("two tokens before the loss, stage 1", "two tokens alone, stage 2"),
    *("sequence", "recompute of all experts", "two tokens on the last stage", "latent attention, recompute"),
    *("tensor and experts", "two tokens, block recompute", "seven layers, interleaved, stage 0"),
    *("seven, recompute, stage 0", "experts and a dense layer, stage 2"),
    *("two tokens and no layer at the loss, stage 2", "two tokens before the loss, stage 0"),
    *("two tokens before the loss, stage 3", "two tokens alone, stage 0", "two tokens alone, stage 3"),
}
"""Cases whose memory other cases cover in parts."""


WHOLE = {**DEEP, "num_layers": 8, "moe_first_dense_layers": 3, "vocab_size": 33000}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data": {DP: 4, EP: 2},
    "tensor": {TP: 8, SP: True, ETP: 1, EP: 4},
    "experts": {DP: 8, EP: 8},
    "expert tensor": {TP: 4, SP: True, ETP: 2, EP: 2},
    "tensor and experts": {TP: 2, SP: True, DP: 4, EP: 4, ETP: 1},
    "pipeline": {PP: 4, TP: 2, SP: True},
    "long pipeline": {PP: 8, DP: 2, EP: 2},
    "interleaved": {PP: 4, VP: 2, TP: 2, SP: True},
    "short ends": {PP: 4, FIRST: 1, LAST: 3},
    "long last stage": {PP: 3, LAST: 4, DP: 2, EP: 2},
    "short ends, interleaved": {PP: 3, VP: 2, FIRST: 2, LAST: 2},
    "embedding and loss count": {PP: 5, EMBEDDING: True, LOSS: True},
    "loss counts, interleaved": {PP: 3, VP: 3, LOSS: True},
    "letters": {PP: 4, LETTERS: "Ett|tt|ttt|tmL"},
    "letters, interleaved with empty stages": {PP: 4, VP: 2, LETTERS: "E|tt|tt|t||t|tt|mL"},
}
TIED = {"untie_embeddings_and_output_weights": False}
BUILT: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    f"{name}, rank {rank}": (WHOLE, rank, knobs)
    for name, knobs in LAYOUTS.items()
    for rank in {world(knobs) // 2, world(knobs) - 1}
} | {
    "biases": ({**DENSE, "add_qkv_bias": True}, 1, {TP: 2, SP: True}),
    "biases and shared experts": ({**SHARED, "add_qkv_bias": True}, 3, {TP: 4, SP: True, ETP: 2, EP: 2}),
    "narrow heads with norms": ({**LONG, **TIED, "kv_channels": 64, "qk_layernorm": True}, 1, {PP: 2, VP: 2}),
    "tied, no gate": (GPT, 0, {}),
    "dense latent attention, tied": ({**LATENT, **TWO, **TIED}, 1, {PP: 2}),
    "copied key heads": ({**DENSE, "num_query_groups": 4}, 5, {TP: 8, SP: True}),
}
"""Ranks that are built, but not trained."""


def steps(knobs: dict[str, Any]) -> int:
    return 4 if knobs.get(PP, 1) > 1 else 2


LOOSE = {
    "experts, interleaved": 0.02,
    "seven layers, interleaved, stage 1": 0.007,
    "experts and a dense layer, stage 1": 0.006,
    "two tokens and no layer at the loss, stage 1": 0.008,
    "two tokens before the loss, stage 0": 0.004,
    "two tokens before the loss, stage 1": 0.005,
    "two tokens alone, stage 1": 0.007,
}
"""What a pipeline's loop still holds of virtual stages is known to within two of its tensors."""


GATHERED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts on one rank": (EXPERTS, WIDE),
    "wide experts on eight": (FEW_EXPERTS, {**WIDE, DP: 8, EP: 8, ETP: 1}),
    "split experts": (EXPERTS, {**WIDE, **TP2, DP: 2, EP: 2, ETP: 2}),
    "on a stage": (SHARED, {**WIDE, **EP2, PP: 2}),
}


@pytest.fixture(scope="module")
def allocated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What megatron-core allocates, by case. All jobs of the chosen tests run in one process."""
    mine = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params["name"] for item in mine if hasattr(item, "callspec")]
    jobs = {name: of_megatron(*BUILT[name]) for name in BUILT}
    jobs |= {name: of_megatron(CASES[name][0], *CASES[name][1:], steps=steps(CASES[name][2])) for name in chosen}
    for name, (model, knobs) in GATHERED.items():
        jobs[f"gathered, {name}"] = of_megatron(model, 0, knobs, steps=steps(knobs), dispatcher="allgather")
    jobs["plain activation"] = of_megatron(DENSE, 0, TP2, steps=2, plain_activation=True)
    jobs["fp32"] = of_megatron(DENSE, 0, {PP: 2}, steps=2, precision="fp32")
    return dict(zip(jobs, run_ranks(tmp_path_factory.mktemp("ranks"), list(jobs.values())), strict=True))


@NEEDS_MEGATRON
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in REPEATS)) for name in CASES])
def test_memory_of_a_rank_matches_megatron(allocated: dict[str, dict[str, int]], name: str) -> None:
    model, rank, knobs = CASES[name]
    inputs, counted = of_physics(model, knobs, steps=steps(knobs)), allocated[name]
    found = rank_memory(*inputs, rank)
    assert parameters(*inputs, rank) == counted["parameters"]
    near = 1e-3 if name == "two tokens alone, stage 3" else 2e-4
    assert found.static[0] == pytest.approx(counted["static"], rel=near)
    assert found.peak[0] == pytest.approx(peak(counted), rel=LOOSE.get(name, 1e-3))


@NEEDS_MEGATRON
def test_parameters_of_a_rank_are_those_that_megatron_builds(allocated: dict[str, Any]) -> None:
    expected = {name: parameters(*of_physics(model, knobs), rank) for name, (model, rank, knobs) in BUILT.items()}
    assert {name: allocated[name] for name in BUILT} == expected


def parameters(train: Training, split: Layout, rank: int) -> float:
    parts = stage_parameters(train, split, stage_of_rank(train, split, rank))
    return float(sum(part.sum() for part in split_parameters(parts)))


@NEEDS_MEGATRON
def test_memory_of_a_dispatcher_that_gathers_matches_megatron(allocated: dict[str, dict[str, int]]) -> None:
    for name, (model, knobs) in GATHERED.items():
        train, split = of_physics(model, knobs, steps=steps(knobs))
        options = dataclasses.replace(train.options, dispatcher="allgather")
        found = rank_memory(dataclasses.replace(train, options=options), split, 0)
        counted = allocated[f"gathered, {name}"]
        assert found.static[0] == pytest.approx(counted["static"], rel=1e-3)
        assert found.peak[0] == pytest.approx(peak(counted), rel=1e-3)


@NEEDS_MEGATRON
def test_memory_of_other_widths_matches_megatron(allocated: dict[str, dict[str, int]]) -> None:
    found = {
        "plain activation": rank_memory(*of_physics(DENSE, TP2, steps=2, fused_activation=False), 0),
        "fp32": rank_memory(*of_physics(DENSE, {PP: 2}, steps=2, precision="fp32"), 0),
    }
    for name, memory in found.items():
        assert memory.static[0] == pytest.approx(allocated[name]["static"], rel=2e-4)
        assert memory.peak[0] == pytest.approx(peak(allocated[name]), rel=2e-3)


def peak(counted: dict[str, int]) -> int:
    return max(counted["forward_backward"], counted["optimizer"])
