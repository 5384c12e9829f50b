"""Reads models from the headers of GGUF files.

Sources: ggml `docs/gguf.md` and llama.cpp `gguf-py/gguf/constants.py` for keys, and `gguf-py/gguf/tensor_mapping.py`
for tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from typing import Any

from flagcore.domain.files import open_regular
from flagcore.domain.model import Layer, Mixer, Model
from flagcore.errors import NoDevice, SpecError
from flagcore_models.layers import attention_of, layers_of
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.mixers.mamba import Mamba
from flagcore_models.mixers.mamba2 import Mamba2
from flagcore_models.mixers.short_convolution import ShortConvolution

_SIZES = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
PERIODS = {"gemma2": 2, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "afmoe": 4, "gemma3n": 5, "gemma3": 6}
"""In models with windows, the last one of each so many layers has none, unless the file gives a pattern (llama.cpp
`src/models/*.cpp`: set_swa_pattern)."""
LINEAR = ("qwen3next", "qwen35")
"""The beginnings of names of architectures with a gated DeltaNet in all but every n-th layer."""
HARMLESS = (
    *("rope.", "attention.layer_norm", "attention.scale", "attention.causal", "attention.value_length", "expert_group"),
    *("attn_logit", "final_logit", "expert_weights", "expert_gating", "logit_scale", "embedding_scale", "vocab_size"),
    *("context_length", "residual_scale", "tensor_data_layout", "full_attention_interval", "expert_feed_forward"),
    *("expert_shared", "expert_used", "leading_dense", "pooling_type", "attention.key_length", "nextn_predict_layers"),
)
"""The beginnings of names that change no size, or that are read where they count."""


def gguf_shape(path: str) -> dict[str, Any]:
    """Return the model in a GGUF file as plain data of an inline shape.

    Raises SpecError if the file is not a GGUF file or lacks a size, or NoDevice if the gguf package is not installed.
    """
    header = _header(path)
    shape: dict[str, Any] = {key: header.size(name) for key, name in _SIZES.items()}
    # xllamacpp 2026.10.11549: the last blocks, for multi-token prediction, are neither loaded nor cached
    if (drafts := header.size("nextn_predict_layers", 0)) >= shape["num_layers"]:
        problem = f"has {drafts} blocks for multi-token prediction of {shape['num_layers']}, so no layers"
        raise SpecError(key="model", value=path, problem=problem, fix="give a complete model")
    shape["num_layers"] -= drafts
    shape["num_query_groups"] = header.size("attention.head_count_kv", shape["num_attention_heads"])
    shape["kv_channels"] = header.size("attention.key_length", shape["hidden_size"] // shape["num_attention_heads"])
    shape["vocab_size"] = header.vocabulary()
    shape["gated_linear_unit"] = header.has("ffn_gate") or header.has("ffn_gate_exps") or header.arch == "phi3"
    shape["untie_embeddings_and_output_weights"] = "output.weight" in header.tensors
    shape["qk_layernorm"] = header.has("attn_q_norm")
    shape["add_qkv_bias"] = header.has("attn_q", "bias") or header.has("attn_qkv", "bias")
    return shape | _experts(header, shape) | _latent(header, shape)


def with_layers(model: Model, path: str) -> Model:
    """Return the model of a GGUF file with the windows, heads, states and convolutions of each of its layers.

    Latent attention is the same in all layers. Raises like `gguf_shape`.
    """
    header = _header(path)
    layers = layers_of(model)
    if not model.kv_lora_rank:
        layers = tuple(layer for number, each in enumerate(layers) for layer in _layers(header, model, each, number))
    if layers != layers_of(model):
        model = replace(model, num_layers=len(layers), layers=layers)
    return replace(model, unread=tuple(header.unread()))


def _layers(header: _Header, model: Model, layer: Layer, number: int) -> Iterator[Layer]:
    """Yield the layer of a block: with both of its mixers, if it has two, the first one without a network."""
    heads, groups = (header.at(f"attention.{name}", number) for name in ("head_count", "head_count_kv"))
    width, is_apart = header.at("feed_forward_length", number), header.arch.startswith("nemotron_h")
    network = layer.network if width or (model.experts and not is_apart) else None
    window = header.at("attention.sliding_window", 0) if _has_window(header, number) else None
    sizes = {"num_heads": heads or model.num_attention_heads, "groups": groups or model.num_query_groups}
    attention = attention_of(model, **sizes, window=window)
    interval = header.at("full_attention_interval", 0) or 4
    if groups == 0 or (header.arch.startswith(LINEAR) and (number + 1) % interval):
        yield Layer(mixer=None if is_apart and width else _mixer(header, model), network=network)
    elif header.arch == "falcon-h1":
        yield Layer(mixer=_mixer(header, model), network=None)
        yield Layer(mixer=attention, network=network)
    else:
        yield Layer(mixer=attention, network=None if is_apart else network)


def _has_window(header: _Header, number: int) -> bool:
    period = header.at("attention.sliding_window_pattern", number)
    if isinstance(period, bool):
        return period
    period = period or PERIODS.get(header.arch)
    return period is not None and number % period < period - 1


def _mixer(header: _Header, model: Model) -> Mixer | None:
    """Return the mixer of a layer without attention, or None if the file describes none."""
    if kernel := header.at("shortconv.l_cache", 0):
        return ShortConvolution(width=model.hidden_size, kernel=kernel)
    if not (width := header.at("ssm.inner_size", 0)):
        return None
    names = ("state_size", "time_step_rank", "conv_kernel")
    state, rank, kernel = (max(header.size(f"ssm.{name}"), 1) for name in names)
    groups = header.at("ssm.group_count", 0)
    if header.arch.startswith(LINEAR) and groups:
        sizes = {"key_heads": groups, "value_heads": rank, "key_dim": state, "value_dim": width // rank}
        return GatedDeltaNet(**sizes, kernel=kernel)
    if not groups:
        return Mamba(width=width, state_size=state, rank=rank, kernel=kernel)
    return Mamba2(num_heads=rank, head_dim=width // rank, state_size=state, groups=groups, kernel=kernel)


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
        self.path, self._fields, self._read = path, reader.fields, set[str]()
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

    def at(self, name: str, layer: int) -> int | None:
        """Return the integer or the truth value `name` of a layer, or of all layers. None if it is missing."""
        value = self._value(f"{self.arch}.{name}")
        value = value[layer] if isinstance(value, list) and layer < len(value) else value
        return value if isinstance(value, int) else None

    def unread(self) -> Iterator[tuple[str, str]]:
        """Yield the names and values of the sizes that were not read."""
        start = f"{self.arch}."
        for key in self._fields:
            name, is_read = key.removeprefix(start), key in self._read
            if key.startswith(start) and not is_read and not name.startswith(HARMLESS) and (value := self._value(key)):
                yield name, str(value)

    def vocabulary(self) -> int:
        """Return the size of the vocabulary: the value in the header, or else the length of the list of tokens."""
        tokens = self._fields.get("tokenizer.ggml.tokens")
        return self.size("vocab_size", len(tokens.data) if tokens is not None else None)

    def has(self, tensor: str, kind: str = "weight") -> bool:
        """Return whether any layer has the tensor. `kind` is weight or bias."""
        return any(name.startswith("blk.") and name.endswith(f".{tensor}.{kind}") for name in self.tensors)

    def _value(self, key: str) -> object:
        field = self._fields.get(key)
        self._read.add(key)
        return None if field is None else field.contents()


MOST_FIELDS, MOST_ITEMS = 100_000, 2_000_000
"""The maximum numbers of tensors and of keys of a file, and of the items of its lists, such as tokens."""
_STRING, _LIST = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The bytes of a value by its type (ggml `docs/gguf.md`)."""


def _check_size(data: mmap) -> None:
    """Raise ValueError if a header ends early, or has more than gguf, which reads item by item, reads in seconds."""
    order: Any = "little" if data[4:6] != b"\0\0" else "big"

    def number(at: int, size: int = 8) -> int:
        if at + size > len(data):
            raise ValueError("it ends within its header")
        return int.from_bytes(data[at : at + size], order)

    if max(counts := (number(8), number(16))) > MOST_FIELDS:
        raise ValueError(f"it has {max(counts):,} tensors or keys, at most {MOST_FIELDS:,} are read")
    at, items = 24, 0
    for _ in range(counts[1]):
        at += 8 + number(at)
        kind, at, count = number(at, 4), at + 4, 1
        if kind == _LIST:
            kind, count, at = number(at, 4), number(at + 4), at + 12
        items += count
        if items > MOST_ITEMS:
            raise ValueError(f"its lists have more than {MOST_ITEMS:,} items")
        if kind == _STRING:
            for _item in range(count):
                at += 8 + number(at)
        else:
            at += count * _BYTES[kind]


@lru_cache(maxsize=8)
def _header(path: str) -> _Header:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise NoDevice(f"reading {path} needs the gguf package; pip install gguf") from None
    try:
        with open_regular(path) as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            _check_size(data)
        return _Header(path, GGUFReader(path))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        problem = f"is not a GGUF file ({error})"
    raise SpecError(key="model", value=path, problem=problem, fix="give a GGUF file")
