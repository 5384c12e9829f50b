"""A model in Megatron's flags, as FlagScale's trees have it, as an inline shape: with Megatron's own defaults."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from flagcore.importers.flagscale.flat import Flat
from flagcore.spec.plain_data import spec_error

_SAME = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "qk_layernorm", "mtp_num_layers")
_EXPERTS = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_LATENT = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Megatron's own sizes of MLA (`MLATransformerConfig` of megatron-core 0.16)."""
OTHER_LAYERS = (
    "experimental_attention_variant",
    "linear_",
    "attention_output_gate",
    "hybrid_",
    "is_hybrid",
    "mamba_",
    "rwkv",
    "window_",
    "use_mimo",
    "mimo_",
    "vision_",
    "patch_dim",
    "patch_size",
    "img_",
    "use_engram",
    "engram_",
    "enable_hyper_connections",
)
"""Flags, by how they begin, of layers besides attention and feed-forward networks."""
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
    found["ffn_hidden_size"] = _width(flat, found["hidden_size"], gated)
    groups, grouped = flat.take("num_query_groups"), flat.take("group_query_attention")
    latent = bool(flat.take("multi_latent_attention"))
    if grouped and not latent:
        found["num_query_groups"] = groups or 1
    if latent and grouped:
        text = f"dropped ({grouped}): latent attention has no groups of queries"
        flat.note("group_query_attention", text, "model")
    if groups is not None and (latent or not grouped):
        flat.note("num_query_groups", "dropped: without group_query_attention every head has keys of its own", "model")
    found["untie_embeddings_and_output_weights"] = bool(flat.take("untie_embeddings_and_output_weights"))
    biases = not flat.take("disable_bias_linear") and flat.take("add_bias_linear", True)
    if biases:
        text = "is not set, so linear layers have biases; of these only those of queries, keys and values are modelled"
        flat.note("disable_bias_linear", text, "model")
    else:
        flat.note("disable_bias_linear", "linear layers have no biases, but those of add_qkv_bias", "model")
    if (flat.take("add_qkv_bias") or biases) and not latent:
        found["add_qkv_bias"] = True
    found |= _experts(flat, found["num_layers"])
    if latent:
        found["multi_latent_attention"] = True
        found |= {key: flat.take(key, own) for key, own in _LATENT.items()}
        if (rank := flat.take("q_lora_rank")) is not None:
            found["q_lora_rank"] = rank
    _tell_other_layers(flat)
    return found


def _tell_other_layers(flat: Flat) -> None:
    """Tell what the model has that flagcore's shapes cannot say: the shape is then another model than the tree's."""
    for key, value in flat.given():
        if key.startswith("freeze_") and value:
            flat.take(key)
            flat.note(key, f"dropped ({value}): all weights are trained, and their gradients and states kept", "model")
        if key.startswith(OTHER_LAYERS) and value not in (None, False, 0):
            flat.take(key)
            flat.note(key, f"dropped ({value}): the shape is of a plain decoder with attention, not of this", "model")


def _width(flat: Flat, hidden: int, gated: bool) -> Any:
    """Return the width of the feed-forward network: as given, or as FlagScale's Megatron reckons it."""
    given, multiple, factor = (flat.take(key) for key in ("ffn_hidden_size", "multiple_of", "hidden_dim_multiplier"))
    if given is not None:
        for key, value in (("multiple_of", multiple), ("hidden_dim_multiplier", factor)):
            if value is not None:
                flat.note(key, f"dropped ({value}): ffn_hidden_size is given", "model.ffn_hidden_size")
        return given
    if not gated:
        return 4 * hidden
    numbers = [each for each in (multiple, factor) if each is not None]
    if any(isinstance(each, (bool, str, list)) or each <= 0 for each in numbers):
        value = {"multiple_of": multiple, "hidden_dim_multiplier": factor}
        raise spec_error(flat.key("multiple_of"), "must be a positive number", value=value, file=flat.source.file)
    if multiple is None:
        if factor is not None:
            flat.note("hidden_dim_multiplier", f"dropped ({factor}): it needs multiple_of", "model.ffn_hidden_size")
        return int(4 * hidden * 2 / 3 / 64) * 64
    width = math.ceil(int(int(4 * hidden * 2 / 3) * (factor or 1)) / multiple) * multiple
    for key, value in (("multiple_of", multiple), ("hidden_dim_multiplier", factor)):
        if value is not None:
            flat.note(key, f"with {value} ffn_hidden_size is {width}", "model.ffn_hidden_size")
    return width


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
