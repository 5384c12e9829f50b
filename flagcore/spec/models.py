"""Reads models from paths or inline shapes, and checks rules that concern several sizes.

Sources for GGUF files: ggml `docs/gguf.md` and llama.cpp `gguf-py/gguf/constants.py` for keys, and
`gguf-py/gguf/tensor_mapping.py` for tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from flagcore.domain.model import Model
from flagcore.errors import NoDevice, SpecError, join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import plain, read_mapping, spec_error
from flagcore.spec.validate import Context, Layers, ModelPath, NoLayers, NoSize, Section, Size, Word, checked, rule


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
    num_moe_experts: Size | None = None
    """Number of routed experts of an MoE layer; null: a dense model."""
    moe_router_topk: NoSize | None = None
    """Number of experts per token."""
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


_MLA_SIZES = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_MOE_SIZES = ("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_first_dense_layers")


def model_from(source: object, *, base: Path) -> Model:
    """Return the model that `source` describes: a path, which may be relative to `base`, or an inline shape.

    The inline shape is plain data. Raises SpecError.
    """
    return _held(plain({"model": str(source) if isinstance(source, Path) else source}), Context(base=base))


def model_of(source: str | Shape, context: Context) -> Model:
    """Return the model that `source` describes: a path, or a validated inline shape. Raises SpecError."""
    return model_of_shape(source) if isinstance(source, Shape) else _model_at(source, context.base)


ModelInput = Annotated[ModelPath | Shape, rule(model_of)]
"""The type of a key with a path or an inline shape. Validation replaces it with a `Model`."""


class _Holder(Section):
    model: ModelInput


def _held(data: dict[str, Any], context: Context) -> Model:
    model: Any = checked(_Holder, data, context).model
    return model  # type: ignore[no-any-return]


def model_of_shape(shape: Shape) -> Model:
    """Return the model that an inline shape describes, with defaults filled in.

    Raises SpecError with all broken rules.
    """
    sizes, problems = shape.model_dump(), dict[str, SpecError]()
    fail = _collector(problems, sizes)
    if shape.multi_latent_attention:
        for key in _MLA_SIZES:
            if sizes[key] is None:
                problem = "is missing, but multi_latent_attention is true"
                fail(key, problem, "give its size, or remove multi_latent_attention")
    else:
        for key in ("q_lora_rank", *_MLA_SIZES):
            if sizes[key] is not None:
                fail(key, "needs multi_latent_attention: true", "add that, or remove this key")
    if shape.num_moe_experts is None:
        for key in _MOE_SIZES:
            if sizes[key]:
                fail(key, "needs num_moe_experts", "add that, or remove this key")
    elif not shape.moe_router_topk:
        fail("moe_router_topk", "is missing, but num_moe_experts is given", f"use 1 to {shape.num_moe_experts}")
    else:
        sizes["moe_ffn_hidden_size"] = shape.moe_ffn_hidden_size or shape.ffn_hidden_size
    heads = shape.num_attention_heads
    if shape.kv_channels is None:
        if shape.multi_latent_attention:
            sizes["kv_channels"] = shape.qk_head_dim
        else:
            sizes["kv_channels"] = shape.hidden_size // heads
            if shape.hidden_size % heads:
                text = _("must be divisible by {name} = {value}", name="num_attention_heads", value=heads)
                fail("hidden_size", text, _("change it, or give kv_channels"))
    sizes["num_query_groups"] = shape.num_query_groups or heads
    for key in ("moe_router_topk", "moe_first_dense_layers", "mtp_num_layers"):
        sizes[key] = sizes[key] or 0
    sizes["moe_shared_expert_intermediate_size"] = shape.moe_shared_expert_intermediate_size or None
    model = Model(**sizes)
    for key, error in _contradictions(model, {}).items():
        problems.setdefault(key, error)
    if problems:
        raise join_errors(list(problems.values()))
    return model


def _collector(problems: dict[str, SpecError], values: Mapping[str, object]) -> Callable[[str, str, str], None]:
    """Return a function that adds an error to `problems`, given a key, the problem and the fix."""

    def fail(key: str, problem: str, fix: str) -> None:
        problems[key] = spec_error((key,), problem, value=values[key], fix=fix)

    return fail


def check_model(model: Model, names: Mapping[str, str]) -> None:
    """Raise SpecError if sizes of `model` contradict each other.

    `names`: the keys of the file by field of `Model`, where they differ.
    """
    if found := _contradictions(model, names):
        raise join_errors(list(found.values()))


def _contradictions(model: Model, names: Mapping[str, str]) -> dict[str, SpecError]:
    """Return an error for each key whose value contradicts another key. `names` is as in `check_model`."""
    key_of = {field: names.get(field, field) for field in Model.__dataclass_fields__}
    problems = dict[str, SpecError]()
    fail = _collector(problems, {key: getattr(model, field) for field, key in key_of.items()})
    heads, groups, experts = model.num_attention_heads, model.num_query_groups, model.num_moe_experts
    if heads % groups:
        divisors = [str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0][-6:]
        problem = _("must divide {name} = {value}", name=key_of["num_attention_heads"], value=heads)
        fail(key_of["num_query_groups"], problem, _("use {values}", values=", ".join(divisors)))
    elif model.multi_latent_attention and groups != heads:
        problem = f"must equal {key_of['num_attention_heads']} = {heads} with multi-latent attention"
        fail(key_of["num_query_groups"], problem, f"use {heads}")
    if experts is not None and not 1 <= model.moe_router_topk <= experts:
        problem = f"must be from 1 to {key_of['num_moe_experts']} = {experts}"
        fail(key_of["moe_router_topk"], problem, f"use {experts} or fewer")
    if experts is not None and model.moe_first_dense_layers >= model.num_layers:
        problem = f"must be below {key_of['num_layers']} = {model.num_layers} in a model with experts"
        fail(key_of["moe_first_dense_layers"], problem, f"use {model.num_layers - 1} or fewer")
    return problems


def _model_at(source: str, base: Path) -> Model:
    from flagcore.spec.huggingface import model_of_config, vision_of

    fix = _("give a directory with a config.json, that file, a GGUF file, or an inline shape; nothing is downloaded")
    path, problem = base / source, ""
    try:
        if path.is_dir():
            path /= "config.json"
            problem = "" if path.exists() else _("is a directory without a config.json")
        elif not path.exists():
            problem = _("does not exist")
    except OSError as error:
        problem = _("cannot be read ({why})", why=error.strerror)
    if problem:
        raise spec_error("", problem, value=source, fix=fix)
    file, absolute = str(path), path.absolute()
    name = (absolute.parent.name if path.name == "config.json" else path.stem) or "model"
    if path.suffix == ".gguf":
        sizes = {key: value for key, value in gguf_shape(file).items() if value is not None}
        return _held({"model": {**sizes, "name": name}}, Context(file=file))
    data = read_mapping(path, file=file, key="model")
    model = model_of_config(data, name=name, file=file)
    sizes_file = path.with_name("preprocessor_config.json")
    pixels = read_mapping(sizes_file, file=str(sizes_file), key="model") if sizes_file.is_file() else {}
    return replace(model, vision=vision_of(data, pixels))


_SIZES = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}


def gguf_shape(path: str) -> dict[str, Any]:
    """Return the model in a GGUF file as plain data of an inline shape.

    Raises SpecError if the file is not a GGUF file or lacks a size, or NoDevice if the gguf package is not installed.
    """
    header = _header(path)
    found: dict[str, Any] = {key: header.size(name) for key, name in _SIZES.items()}
    found["num_query_groups"] = header.size("attention.head_count_kv", found["num_attention_heads"])
    found["kv_channels"] = header.size("attention.key_length", found["hidden_size"] // found["num_attention_heads"])
    found["vocab_size"] = header.vocabulary()
    found["gated_linear_unit"] = header.has("ffn_gate") or header.has("ffn_gate_exps") or header.arch == "phi3"
    found["untie_embeddings_and_output_weights"] = "output.weight" in header.tensors
    found["qk_layernorm"] = header.has("attn_q_norm")
    found["add_qkv_bias"] = header.has("attn_q", "bias") or header.has("attn_qkv", "bias")
    return found | _experts(header, found) | _latent(header, found)


def context_length(path: str) -> int:
    """Return the maximum context length of the model in a GGUF file, in tokens. Raises like `gguf_shape`."""
    return _header(path).size("context_length")


def _experts(header: _Header, found: dict[str, Any]) -> dict[str, Any]:
    experts = header.size("expert_count", 0)
    if not experts:
        return {}
    width = header.size("expert_feed_forward_length", found["ffn_hidden_size"])
    shared = header.size("expert_shared_count", 0)
    return {
        "num_moe_experts": experts,
        "moe_router_topk": header.size("expert_used_count"),
        "moe_ffn_hidden_size": width,
        "moe_first_dense_layers": header.size("leading_dense_block_count", 0),
        "moe_shared_expert_intermediate_size": header.size("expert_shared_feed_forward_length", shared * width) or None,
    }


def _latent(header: _Header, found: dict[str, Any]) -> dict[str, Any]:
    rank = header.size("attention.kv_lora_rank", 0)
    if not rank:
        return {}
    rope = header.size("rope.dimension_count")
    head = header.size("attention.key_length_mla", header.size("attention.key_length"))
    return {
        "multi_latent_attention": True,
        "num_query_groups": found["num_attention_heads"],
        "kv_channels": head,
        "kv_lora_rank": rank,
        "q_lora_rank": header.size("attention.q_lora_rank", 0) or None,
        "qk_head_dim": head - rope,
        "qk_pos_emb_head_dim": rope,
        "v_head_dim": header.size("attention.value_length_mla", header.size("attention.value_length", head)),
    }


class _Header:
    def __init__(self, path: str, reader: Any) -> None:
        self.path, self._fields = path, reader.fields
        self.tensors = {tensor.name for tensor in reader.tensors}
        self.arch = str(self._value("general.architecture"))

    def size(self, name: str, default: int | None = None) -> int:
        """Return the integer `name` of the header. If there is one value per layer, return the largest.

        Raises SpecError if the value is missing and `default` is None.
        """
        value = self._value(f"{self.arch}.{name}")
        if value is None and default is not None:
            return default
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise SpecError(
                key="model", value=self.path, problem=f"has no {self.arch}.{name}", fix="give a complete model"
            )
        return int(max(numbers))

    def vocabulary(self) -> int:
        """Return the size of the vocabulary: the value in the header, or else the length of the list of tokens."""
        tokens = self._fields.get("tokenizer.ggml.tokens")
        return self.size("vocab_size", len(tokens.data) if tokens is not None else None)

    def has(self, tensor: str, kind: str = "weight") -> bool:
        """Return whether any layer has the tensor. `kind` is weight or bias."""
        return any(name.startswith("blk.") and name.endswith(f".{tensor}.{kind}") for name in self.tensors)

    def _value(self, key: str) -> object:
        field = self._fields.get(key)
        return None if field is None else field.contents()


@lru_cache(maxsize=8)
def _header(path: str) -> _Header:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise NoDevice(f"reading {path} needs the gguf package; pip install gguf") from None
    try:
        return _Header(path, GGUFReader(path))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        problem = f"is not a GGUF file ({error})"
    raise SpecError(key="model", value=path, problem=problem, fix="give a GGUF file")
