"""A model in Megatron's flags, as FlagScale's trees have it, as an inline shape: with Megatron's own defaults."""

from __future__ import annotations

import ast
import re
from typing import Any

from flagcore.spec.flagscale.flat import Flat
from flagcore.spec.plain import spec_error

_SAME = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "qk_layernorm", "mtp_num_layers")
_EXPERTS = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_LATENT = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Megatron's own sizes of MLA (`MLATransformerConfig` of megatron-core 0.16)."""
_FREQUENCY = re.compile(r"[\[\]\d\s+*,()]{1,200}")


def shape(flat: Flat, vocabulary: object) -> dict[str, Any]:
    """Return the section `model`. Raises SpecError where a size is missing or a pattern of experts cannot be told."""
    if vocabulary is None:
        fix = "give the number of tokens, also as an override: +train.data.tokenizer.vocab_size=32000"
        raise spec_error("train.data.tokenizer.vocab_size", "is missing", fix=fix, file=flat.source.file)
    found: dict[str, Any] = {key: value for key in _SAME if (value := flat.take(key)) is not None}
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        if key not in found:
            raise spec_error(f"train.model.{key}", "is missing", fix="give it", file=flat.source.file)
        if not isinstance(found[key], int):
            raise spec_error(f"train.model.{key}", "must be a number", value=found[key], file=flat.source.file)
    found["vocab_size"] = vocabulary
    gated = bool(flat.take("swiglu"))
    found["gated_linear_unit"] = gated
    found["ffn_hidden_size"] = flat.take("ffn_hidden_size") or _width(found["hidden_size"], gated)
    groups, grouped = flat.take("num_query_groups"), flat.take("group_query_attention")
    latent = bool(flat.take("multi_latent_attention"))
    if grouped and not latent:
        found["num_query_groups"] = groups or 1
    elif groups is not None:
        flat.note("num_query_groups", "dropped: without group_query_attention every head has keys of its own", "model")
    found["untie_embeddings_and_output_weights"] = bool(flat.take("untie_embeddings_and_output_weights"))
    biases = not flat.take("disable_bias_linear") and flat.take("add_bias_linear", True)
    if biases:
        text = "is not set, so linear layers have biases; of these only those of queries, keys and values are modelled"
        flat.note("disable_bias_linear", text, "model")
    if (flat.take("add_qkv_bias") or biases) and not latent:
        found["add_qkv_bias"] = True
    found |= _experts(flat, found["num_layers"])
    if latent:
        found["multi_latent_attention"] = True
        found |= {key: flat.take(key, own) for key, own in _LATENT.items()}
        if (rank := flat.take("q_lora_rank")) is not None:
            found["q_lora_rank"] = rank
    return found


def _width(hidden: int, gated: bool) -> int:
    """Return Megatron's own width of the feed-forward network."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _experts(flat: Flat, layers: int) -> dict[str, Any]:
    experts, frequency = flat.take("num_experts", flat.take("num_moe_experts")), flat.take("moe_layer_freq", 1)
    if experts is None:
        return {}
    given = {key: value for key in _EXPERTS if (value := flat.take(key)) is not None}
    found = {"num_moe_experts": experts, "moe_router_topk": 2, **given}
    dense = _dense_layers(frequency, layers)
    if dense is None:
        key, problem = flat.key("moe_layer_freq"), "is no pattern of dense layers first, then layers with experts"
        fix = "flagcore has no other; use such as [0]+[1]*26"
        raise spec_error(key, problem, value=frequency, fix=fix, file=flat.source.file)
    return {**found, "moe_first_dense_layers": dense} if dense else found


def _dense_layers(frequency: object, layers: int) -> int | None:
    """Return how many layers come before those with experts; None for any other pattern."""
    pattern = _pattern(frequency)
    if isinstance(pattern, int):
        pattern = [0 if layer % pattern else 1 for layer in range(layers)] if pattern > 0 else []
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    return dense if pattern == [0] * dense + [1] * (layers - dense) and dense < layers else None


def _pattern(frequency: object) -> int | list[int]:
    """Return a frequency, or the list that a text such as `[0]+[1]*26` means."""
    if isinstance(frequency, str) and _FREQUENCY.fullmatch(frequency):
        try:
            found: int | list[int] = _value(ast.parse(frequency.strip(), mode="eval").body)
            return found
        except (SyntaxError, ValueError, TypeError, RecursionError):
            return []
    return frequency if isinstance(frequency, (int, list)) else []


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if max(each if isinstance(each, int) else len(each) for each in (left, right)) > 10_000:
            raise ValueError("too long")
        return left * right
    raise ValueError("no list of 0 and 1")
