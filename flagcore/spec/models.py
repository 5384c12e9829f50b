"""Reads models from paths or inline shapes, and knows public models by name: a plan needs no download.

Sources for GGUF files: ggml `docs/gguf.md` and llama.cpp `gguf-py/gguf/constants.py` for keys, and
`gguf-py/gguf/tensor_mapping.py` for tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from flagcore.domain.model import Model
from flagcore.errors import NoDevice, SpecError
from flagcore.i18n import _
from flagcore.spec.plain_data import package_yaml, plain, read_mapping, spec_error
from flagcore.spec.shapes import Shape, model_of_shape
from flagcore.spec.validate import Context, ModelPath, Section, checked, rule


def model_from(source: object, *, base: Path) -> Model:
    """Return the model that `source` describes: a path, which may be relative to `base`, or an inline shape.

    The inline shape is plain data. Raises SpecError.
    """
    return _held(plain({"model": str(source) if isinstance(source, Path) else source}), Context(base=base))


def model_of(source: str | Shape | Mapping[str, Any], context: Context) -> Model:
    """Return the model that `source` describes: a path, a validated inline shape, or keys of a config.json.

    Raises SpecError.
    """
    if isinstance(source, Mapping):
        from flagcore.spec.huggingface import model_of_config

        keys = {key: value for key, value in source.items() if key != "name"}
        return model_of_config(keys, name=str(source.get("name", "inline")), file="")
    return model_of_shape(source) if isinstance(source, Shape) else _model_at(source, context.base)


def _or_keys(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    return value if isinstance(value, Mapping) and "model_type" in value else validate(value)


ModelSource = Annotated[
    ModelPath | Shape, WrapValidator(_or_keys, json_schema_input_type=ModelPath | dict[str, Any] | Shape)
]
"""The type of a key with a path, an inline shape, or keys of a config.json."""
ModelInput = Annotated[ModelSource, rule(model_of)]
"""The same, which validation replaces with a `Model`."""


class _Holder(Section):
    model: ModelInput


def _held(data: dict[str, Any], context: Context) -> Model:
    model: Any = checked(_Holder, data, context).model
    return model  # type: ignore[no-any-return]


def _model_at(source: str, base: Path) -> Model:
    """Return the model at a path or with a public name. Raises SpecError."""
    from flagcore.spec.huggingface import model_of_config, vision_of

    fix = _("give a directory with a config.json, a GGUF file, the name of a public model, or an inline shape")
    path, problem = base / source, ""
    try:
        if path.is_dir():
            path /= "config.json"
            problem = "" if path.exists() else _("is a directory without a config.json")
        elif not path.exists():
            if public := find_public(source):
                return model_of_config(public[0], name=source, file="")
            if near := similar_models(source):
                names = " or ".join(near)
                fix = _("did you mean {name}? flag models lists the known names; {fix}", name=names, fix=fix)
            is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
            problem = _("does not exist") if is_path else _("is neither a path nor a model that is known here")
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
    shape: dict[str, Any] = {key: header.size(name) for key, name in _SIZES.items()}
    shape["num_query_groups"] = header.size("attention.head_count_kv", shape["num_attention_heads"])
    shape["kv_channels"] = header.size("attention.key_length", shape["hidden_size"] // shape["num_attention_heads"])
    shape["vocab_size"] = header.vocabulary()
    shape["gated_linear_unit"] = header.has("ffn_gate") or header.has("ffn_gate_exps") or header.arch == "phi3"
    shape["untie_embeddings_and_output_weights"] = "output.weight" in header.tensors
    shape["qk_layernorm"] = header.has("attn_q_norm")
    shape["add_qkv_bias"] = header.has("attn_q", "bias") or header.has("attn_qkv", "bias")
    return shape | _experts(header, shape) | _latent(header, shape)


def context_length(path: str) -> int:
    """Return the maximum context length of the model in a GGUF file, in tokens. Raises like `gguf_shape`."""
    return _header(path).size("context_length")


def _experts(header: _Header, found: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an inline shape for mixture-of-experts layers. Empty for a dense model."""
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
    """Return the keys of an inline shape for multi-head latent attention. Empty for other attention."""
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


_NAMES = package_yaml(__package__, "names.yaml")
FORMATS, _SAME_SHAPE = _NAMES["formats"], _NAMES["same_shape"]


@lru_cache(maxsize=1)
def public_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of public models by name: the keys of config.json."""
    table: dict[str, dict[str, Any]] = package_yaml(__package__, "public_models.yaml")
    return table


def find_public(name: str) -> tuple[dict[str, Any], str | None] | None:
    """Return the config.json of a public model, and the format of its weights if they are quantized.

    Letters may differ in case. Fine-tuned and quantized variants, also of other organizations, have the shape of the
    model whose name they extend. Returns None for an unknown name.
    """
    from flagcore.spec.huggingface import format_of_weights

    found = public_name(name)
    if found is None or name.count("/") != 1:
        return None
    config, weights = dict(public_models()[found]), _stem(name)[1]
    if found.lower() == name.lower() or weights is None:
        return config, format_of_weights(config)
    config.pop("quantization_config", None)
    if weights == "fp8" and name.lower().partition("/")[0] in _NAMES["fp8_blocks"]:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return config, None if weights == "bf16" else weights


def public_name(name: str) -> str | None:
    """Return the public model whose shape a name has, or None. The organization does not matter."""
    table, stem = public_models(), _stem(name)[0]
    names = [known for known in table if known.lower() == name.lower()]
    names += [known for known in table if _stem(known)[0] == stem]
    return names[0] if names else None


def similar_models(name: str) -> list[str]:
    """Return up to three public models that a name may mean. The organization does not matter."""
    if public := public_name(name):
        return [public]
    names = {each.rpartition("/")[2].lower(): each for each in public_models()}
    return [names[each] for each in get_close_matches(name.rpartition("/")[2].lower(), names)]


def absolute_model(source: str, base: Path) -> str:
    """Return the absolute path of a model, or the name itself of a public model that is not a file or directory."""
    path = base / source
    return source if find_public(source) and not path.exists() else str(path.resolve())


def _stem(name: str) -> tuple[str, str | None]:
    """Return the part of a repository's name that determines the shape, and the weight format at its end, if any."""
    words, weights = name.lower().rpartition("/")[2].replace("quantized.", "quantized-").split("-"), None
    words = words[1:] if words[0] in _NAMES["owners"] and len(words) > 1 else words
    words = [*words[:1], *(each for each in words[1:] if each not in ("instruct", "chat"))]
    while len(words) > 1 and (
        words[-1] in _SAME_SHAPE or words[-1] in FORMATS or re.fullmatch(r"[01]\d{3}|2[3-6]\d\d", words[-1])
    ):
        last = FORMATS.get(words.pop())
        weights = weights or last
    return "-".join(words), weights
