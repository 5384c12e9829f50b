"""Translates the model in Megatron's flags, with Megatron's defaults, to an inline shape."""

from __future__ import annotations

import ast
import math
from contextlib import suppress
from typing import Any

from flagcore.engines.megatron.importing.arguments import Flags
from flagcore.errors import join_errors

MODEL_FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "qk_layernorm", "mtp_num_layers")
EXPERT_FLAGS = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
"""Flags of a model that are keys of a spec as well, and those of experts."""
LATENT_SIZES = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Default sizes of MLA (`MLATransformerConfig` of megatron-core 0.16)."""
OTHER_LAYERS = (
    *("experimental_attention_variant", "linear_", "attention_output_gate", "hybrid_", "is_hybrid", "mamba_", "rwkv"),
    *("window_", "use_mimo", "mimo_", "vision_", "patch_dim", "patch_size", "img_", "use_engram", "engram_"),
    "enable_hyper_connections",
)
"""Prefixes of flags for layers other than attention and feed-forward networks."""
MAX_PATTERN = 10_000
"""Maximum text length, list length and factor in an expression for a pattern of layers."""


def shape(flags: Flags, vocabulary: object) -> dict[str, Any]:
    """Return the section `model`. Raises SpecError for a missing size or an unsupported pattern of layers."""
    section: dict[str, Any] = {key: value for key in MODEL_FLAGS if (value := flags.get(key)) is not None}
    problems = []
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        if key not in section:
            problems.append(flags.source.error(flags.key(key), "is missing", fix="give it"))
        elif not isinstance(section[key], int):
            problems.append(flags.source.error(flags.key(key), "must be a number", value=section[key]))
    if problems:
        raise join_errors(problems)
    section["vocab_size"] = vocabulary
    is_gated = bool(flags.get("swiglu"))
    section["gated_linear_unit"] = is_gated
    section["ffn_hidden_size"] = _width(flags, section["hidden_size"], is_gated)
    section["untie_embeddings_and_output_weights"] = bool(flags.get("untie_embeddings_and_output_weights"))
    section |= _attention(flags) | _experts(flags, section["num_layers"])
    _note_other_layers(flags)
    return section


def _attention(flags: Flags) -> dict[str, Any]:
    """Return the query groups, the QKV biases, and the sizes of latent attention."""
    section: dict[str, Any] = {}
    groups, is_grouped = flags.get("num_query_groups"), flags.get("group_query_attention")
    is_latent = bool(flags.get("multi_latent_attention"))
    if is_grouped and is_latent:
        flags.note("group_query_attention", f"not used ({is_grouped}): latent attention has no query groups", "model")
    elif is_grouped:
        section["num_query_groups"] = groups or 1
    if groups is not None and (is_latent or not is_grouped):
        flags.note("num_query_groups", "not used: without group_query_attention, every head has its own keys", "model")
    has_biases = not flags.get("disable_bias_linear") and flags.get("add_bias_linear", True)
    text = "linear layers have no biases except those of add_qkv_bias"
    if has_biases:
        text = "is not set: linear layers have biases; flagcore models only those of queries, keys and values"
    flags.note("disable_bias_linear", text, "model")
    if (flags.get("add_qkv_bias") or has_biases) and not is_latent:
        section["add_qkv_bias"] = True
    elif flags.get("add_qkv_bias"):
        flags.note("add_qkv_bias", "not in the predictions: latent attention has no such biases", "model")
    if is_latent:
        sizes = {key: flags.get(key, own) for key, own in LATENT_SIZES.items()}
        rank = flags.get("q_lora_rank")
        section |= {"multi_latent_attention": True, **sizes, **({} if rank is None else {"q_lora_rank": rank})}
    return section


def _note_other_layers(flags: Flags) -> None:
    """Note layers of the model that flagcore's shapes cannot describe."""
    enabled = [name for name in flags.names() if flags.get(name) not in (False, 0)]
    texts = ((("freeze_",), "training all weights"), (OTHER_LAYERS, "a plain decoder with attention"))
    for prefixes, model in texts:
        if keys := [flags.key(name) for name in enabled if name.startswith(prefixes)]:
            flags.source.note(", ".join(keys), f"predictions are those of {model}", "model")


def _width(flags: Flags, hidden: int, gated: bool) -> Any:
    """Return the width of the feed-forward network; the default is that of FlagScale's Megatron."""
    width_given, multiple, factor = (
        flags.get(key) for key in ("ffn_hidden_size", "multiple_of", "hidden_dim_multiplier")
    )
    if width_given is not None:
        for key, value in (("multiple_of", multiple), ("hidden_dim_multiplier", factor)):
            if value is not None:
                flags.note(key, f"not used ({value}): ffn_hidden_size is given", "model.ffn_hidden_size")
        return width_given
    if not gated:
        return 4 * hidden
    numbers = [each for each in (multiple, factor) if each is not None]
    if any(isinstance(each, (bool, str, list)) or each <= 0 for each in numbers):
        value = {"multiple_of": multiple, "hidden_dim_multiplier": factor}
        flags.source.report(flags.key("multiple_of"), "must be a positive number", value=value)
        return None
    if multiple is None:
        if factor is not None:
            flags.note("hidden_dim_multiplier", f"not used ({factor}): it needs multiple_of", "model.ffn_hidden_size")
        return int(4 * hidden * 2 / 3 / 64) * 64
    width = math.ceil(int(int(4 * hidden * 2 / 3) * (factor or 1)) / multiple) * multiple
    for key, value in (("multiple_of", multiple), ("hidden_dim_multiplier", factor)):
        if value is not None:
            flags.note(key, f"with {value} ffn_hidden_size is {width}", "model.ffn_hidden_size")
    return width


def _experts(flags: Flags, layers: int) -> dict[str, Any]:
    experts, frequency = flags.get("num_experts", flags.get("num_moe_experts")), flags.get("moe_layer_freq", 1)
    if experts is None:
        return {}
    sizes = {key: value for key in EXPERT_FLAGS if (value := flags.get(key)) is not None}
    section = {"num_moe_experts": experts, "moe_router_topk": 2, **sizes}
    dense = _dense_layers(frequency, layers)
    if dense is None:
        key, problem = flags.key("moe_layer_freq"), "must be dense layers first, then MoE layers"
        flags.source.report(key, problem, value=frequency, fix="use e.g. [0]+[1]*26")
    return {**section, "moe_first_dense_layers": dense} if dense else section


def _dense_layers(frequency: object, layers: int) -> int | None:
    """Return the number of dense layers before the MoE layers, None for another pattern."""
    pattern = _pattern(frequency, layers)
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    return dense if pattern == [0] * dense + [1] * (layers - dense) and dense < layers else None


def _pattern(frequency: object, layers: int) -> list[Any]:
    """Return 1 for each MoE layer and 0 for others, as Megatron's `moe_freq_type` does; empty if it is invalid."""
    value: Any = frequency
    if isinstance(frequency, str) and len(frequency) <= MAX_PATTERN:
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            value = _evaluate(ast.parse(frequency.strip(), mode="eval").body)
    if type(value) is int and value > 0:
        return [0 if layer % value else 1 for layer in range(layers)]
    return value if isinstance(value, list) else []


def _evaluate(node: ast.expr) -> Any:
    """Evaluate an integer, or an expression of lists with `+` and `*`. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int(number)) if number <= MAX_PATTERN:
            return number
        case ast.List(elts=items):
            return [_evaluate(each) for each in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            head, tail = _evaluate(left), _evaluate(right)
            if isinstance(head, list) and isinstance(tail, list) and len(head) + len(tail) <= MAX_PATTERN:
                return head + tail
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            factors = (_evaluate(left), _evaluate(right))
            size = math.prod(len(each) if isinstance(each, list) else each for each in factors)
            if not all(isinstance(each, list) for each in factors) and size <= MAX_PATTERN:
                return factors[0] * factors[1]
    raise ValueError(f"not a pattern of layers: {ast.dump(node)[:80]}")
