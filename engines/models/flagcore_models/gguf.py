"""Reads models from the headers of GGUF files.

Sources: ggml `docs/gguf.md` and llama.cpp `gguf-py/gguf/constants.py` for keys, and `gguf-py/gguf/tensor_mapping.py`
for tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flagcore.errors import NoDevice, SpecError

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
