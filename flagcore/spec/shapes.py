"""Models that a spec describes inline, and rules that concern several sizes of a model."""

from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.domain.model import Model
from flagcore.domain.units import Experts, Layers, NoLayers, NoSize, Size, Word
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import Section


class Shape(Section):
    """The architecture of a transformer. Sizes are numbers of elements."""

    name: Word = "inline"
    """Name of the model in reports."""
    num_layers: Layers
    """Number of transformer layers without multi-token prediction layers."""
    hidden_size: Size
    """Width of the residual stream."""
    ffn_hidden_size: Size
    """Width of a dense layer's feed-forward network."""
    num_attention_heads: Size
    """Number of query heads."""
    num_query_groups: Size | None = None
    """Number of key and value heads; null: the number of query heads."""
    kv_channels: Size | None = None
    """Width of one head; null: hidden_size / num_attention_heads."""
    vocab_size: Size
    """Number of tokens in the vocabulary, before padding."""
    gated_linear_unit: bool = True
    """Whether the feed-forward network has a gate (SwiGLU, GeGLU)."""
    untie_embeddings_and_output_weights: bool = True
    """Whether the output head has its own weights."""
    qk_layernorm: bool = False
    """Whether queries and keys are normalized."""
    add_qkv_bias: bool = False
    """Whether the projections of queries, keys and values have biases."""
    num_moe_experts: Experts | None = None
    """Number of routed experts of an MoE layer; null: a dense model."""
    moe_router_topk: NoSize | None = None
    """Number of experts per token."""
    moe_router_num_groups: NoSize | None = None
    """Number of groups of experts, of which a token uses moe_router_group_topk; null or 0: routing without groups."""
    moe_router_group_topk: NoSize | None = None
    """Number of groups of experts per token."""
    moe_ffn_hidden_size: Size | None = None
    """Width of one routed expert; null: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: NoSize | None = None
    """Total width of the shared experts; null or 0: none."""
    moe_first_dense_layers: NoLayers | None = None
    """Number of leading layers that are dense."""
    multi_latent_attention: bool = False
    """Whether attention is multi-head latent attention (MLA)."""
    q_lora_rank: Size | None = None
    """MLA: rank of the query projection; null: full rank."""
    kv_lora_rank: Size | None = None
    """MLA: rank of the projection of keys and values."""
    qk_head_dim: Size | None = None
    """MLA: width of the part of a query or key head without position."""
    qk_pos_emb_head_dim: Size | None = None
    """MLA: width of the part of a query or key head with the position."""
    v_head_dim: Size | None = None
    """MLA: width of a value head."""
    mtp_num_layers: NoLayers | None = None
    """Number of multi-token prediction layers."""
    mtp_use_repeated_layer: bool = False
    """Whether all of them share the weights of one."""


_MLA_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_MOE_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")
_MOE_SIZES = (
    *("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_first_dense_layers"),
    *_MOE_GROUPS,
)


def model_of_shape(shape: Shape) -> Model:
    """Return the model that an inline shape describes, with defaults filled in.

    Raises SpecError with all broken rules.
    """
    sizes, heads = shape.model_dump(), shape.num_attention_heads
    problems = {
        key: spec_error((key,), problem, value=sizes[key], fix=fix) for key, problem, fix in _gaps(shape, sizes)
    }
    if shape.num_moe_experts is not None and shape.moe_router_topk:
        sizes["moe_ffn_hidden_size"] = shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    if shape.kv_channels is None:
        sizes["kv_channels"] = shape.qk_head_dim if shape.multi_latent_attention else shape.hidden_size // heads
    sizes["num_query_groups"] = shape.num_query_groups or heads
    for key in ("moe_router_topk", *_MOE_GROUPS, "moe_first_dense_layers", "mtp_num_layers"):
        sizes[key] = sizes[key] or 0
    sizes["moe_shared_expert_intermediate_size"] = shape.moe_shared_expert_intermediate_size or None
    model = Model(**sizes)
    problems |= {key: error for key, error in _contradictions(model, {}).items() if key not in problems}
    if problems:
        raise join_errors(list(problems.values()))
    return model


def _gaps(shape: Shape, sizes: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each key that is missing, or that another key rules out: its name, what is wrong, and how to fix it."""
    has_mla, heads = shape.multi_latent_attention, shape.num_attention_heads
    for key in _MLA_SIZES if has_mla else ():
        if sizes[key] is None:
            problem = "is missing, but multi_latent_attention is true"
            yield key, problem, "give its size, or remove multi_latent_attention"
    needs = {} if has_mla else dict.fromkeys(("q_lora_rank", *_MLA_SIZES), "multi_latent_attention: true")
    needs |= dict.fromkeys(_MOE_SIZES, "num_moe_experts") if shape.num_moe_experts is None else {}
    yield from ((key, f"needs {needed}", "add that, or remove this key") for key, needed in needs.items() if sizes[key])
    if shape.num_moe_experts is not None and not shape.moe_router_topk:
        yield "moe_router_topk", "is missing, but num_moe_experts is given", f"use 1 to {shape.num_moe_experts}"
    if shape.kv_channels is None and not has_mla and shape.hidden_size % heads:
        text = _("must be divisible by {name} = {value}", name="num_attention_heads", value=heads)
        yield "hidden_size", text, _("change it, or give kv_channels")


def check_model(model: Model, names: Mapping[str, str]) -> None:
    """Raise SpecError if sizes of `model` contradict each other.

    `names`: the keys in the file of those fields of `Model` whose keys have other names. Messages use these keys.
    """
    if found := _contradictions(model, names):
        raise join_errors(list(found.values()))


def _contradictions(model: Model, names: Mapping[str, str]) -> dict[str, SpecError]:
    """Return an error for each key whose value contradicts another key. `names` is as in `check_model`."""
    problems = dict[str, SpecError]()

    def fail(field: str, problem: str, fix: str) -> None:
        key = names.get(field, field)
        problems[key] = spec_error((key,), problem, value=getattr(model, field), fix=fix)

    heads, groups, experts = model.num_attention_heads, model.num_query_groups, model.num_moe_experts
    heads_key = names.get("num_attention_heads", "num_attention_heads")
    if heads % groups:
        divisors = [str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0][-6:]
        problem = _("must divide {name} = {value}", name=heads_key, value=heads)
        fail("num_query_groups", problem, _("use {values}", values=", ".join(divisors)))
    elif model.multi_latent_attention and groups != heads:
        fail("num_query_groups", f"must equal {heads_key} = {heads} with multi-latent attention", f"use {heads}")
    if experts is not None and not 1 <= model.moe_router_topk <= experts:
        problem = f"must be from 1 to {names.get('num_moe_experts', 'num_moe_experts')} = {experts}"
        fail("moe_router_topk", problem, f"use {experts} or fewer")
    if experts is not None and model.moe_router_num_groups and experts % model.moe_router_num_groups:
        fail("moe_router_num_groups", f"must divide the number of experts, {experts}", "use a divisor, or remove it")
    elif not min(1, model.moe_router_num_groups) <= model.moe_router_group_topk <= model.moe_router_num_groups:
        problem = f"must be from 1 to moe_router_num_groups = {model.moe_router_num_groups}"
        fail("moe_router_group_topk", problem, "change it, or remove both keys")
    if experts is not None and model.moe_first_dense_layers >= model.num_layers:
        layers = f"{names.get('num_layers', 'num_layers')} = {model.num_layers}"
        problem, fix = f"must be below {layers} in a model with experts", f"use {model.num_layers - 1} or fewer"
        fail("moe_first_dense_layers", problem, fix)
    return problems
