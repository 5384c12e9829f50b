"""Hugging Face's config.json: one class a family, with the defaults of its configuration class in transformers.

Only what a shape needs is read; windows of attention are not part of a shape. The five sizes that every
file gives have no default here, because a file without them is a broken one. A family whose layers a `Model`
cannot express is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from flagcore.domain.model import Model
from flagcore.errors import SpecError
from flagcore.spec.limits import Layers, NoLayers, NoSize, Size
from flagcore.spec.models import check_model
from flagcore.spec.plain_data import KeyPath, spec_error
from flagcore.spec.validate import checked, joined

NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_first_dense_layers": "first_k_dense_replace",
}
"""Field of `Model` -> key of config.json, for messages."""

Fields = dict[str, Any]


class Family(BaseModel):
    """A dense transformer: llama and what follows it."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)

    num_hidden_layers: Layers
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def fields(self) -> Fields:
        """Return the fields of `Model`, without its name. Raises SpecError for what a `Model` cannot express."""
        if self.mlp_bias:
            raise spec_error("mlp_bias", "is not supported", value=True, fix="biases of the FFN are not modelled")
        return {
            "num_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_key_value_heads or self.num_attention_heads,
            "kv_channels": self._head_width(),
            "vocab_size": self.vocab_size,
            "untie_embeddings_and_output_weights": not self.tie_word_embeddings,
            "add_qkv_bias": self.attention_bias,
            **self._own_fields(),
        }

    def _head_width(self) -> int:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            problem = f"must be divisible by num_attention_heads = {self.num_attention_heads}"
            raise spec_error("hidden_size", problem, value=self.hidden_size, fix="change it, or give head_dim")
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def _own_fields(self) -> Fields:
        return {}


class Mistral(Family):
    """mistral."""

    num_key_value_heads: Size | None = 8


class Qwen2(Family):
    """qwen2 (also Qwen2.5): biases of queries, keys and values are always there."""

    num_key_value_heads: Size | None = 32

    def _own_fields(self) -> Fields:
        return {"add_qkv_bias": True}


class Qwen3(Family):
    """qwen3."""

    num_key_value_heads: Size | None = 32
    head_dim: Size | None = 128

    def _own_fields(self) -> Fields:
        return {"qk_layernorm": True}


class Gemma(Family):
    """gemma (the first one; later ones have norms that a `Model` cannot express)."""

    num_key_value_heads: Size | None = 16
    head_dim: Size | None = 256
    tie_word_embeddings: bool = True


class Mixtral(Family):
    """mixtral: every layer has experts."""

    num_key_value_heads: Size | None = 8
    num_experts: Size = Field(8, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Size = 2

    def _own_fields(self) -> Fields:
        return _experts(self.num_experts, self.num_experts_per_tok, self.intermediate_size)


class GptOss(Mixtral):
    """gpt_oss: a mixtral with biases and heads of 64."""

    head_dim: Size | None = 64
    attention_bias: bool = True
    num_experts: Size = Field(128, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: Size = Field(4, validation_alias=AliasChoices("num_experts_per_tok", "experts_per_token"))


class Qwen3Moe(Family):
    """qwen3_moe: a layer has experts if its number, from 1, is a multiple of decoder_sparse_step."""

    num_key_value_heads: Size | None = 4
    num_experts: NoSize = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[NoLayers] | None = None

    def _own_fields(self) -> Fields:
        return {"qk_layernorm": True, **self._expert_fields()}

    def _expert_fields(self) -> Fields:
        layers, only = self.num_hidden_layers, self.mlp_only_layers or []
        dense = {layer for layer in range(layers) if layer in only or (layer + 1) % self.decoder_sparse_step}
        if self.num_experts == 0 or len(dense) == layers:
            return {}
        mixed = ("mlp_only_layers", only) if only else ("decoder_sparse_step", self.decoder_sparse_step)
        first_dense = _first_dense(dense, *mixed)
        experts = _experts(self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        return {**experts, "moe_first_dense_layers": first_dense}


class Qwen2Moe(Qwen3Moe):
    """qwen2_moe: a qwen3_moe with biases, without norms of queries and keys, with a shared expert."""

    num_key_value_heads: Size | None = 16
    num_experts: NoSize = Field(60, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1408
    shared_expert_intermediate_size: NoSize = 5632
    qkv_bias: bool = True

    def _own_fields(self) -> Fields:
        experts = self._expert_fields()
        shared = self.shared_expert_intermediate_size if experts else None
        return {"add_qkv_bias": self.qkv_bias, **experts, "moe_shared_expert_intermediate_size": shared or None}


class DeepseekV2(Family):
    """deepseek_v2: latent attention; the first layers are dense, the others have routed and shared experts."""

    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    n_routed_experts: NoSize | None = 64
    n_shared_experts: NoSize | None = 2
    num_experts_per_tok: Size | None = None
    moe_intermediate_size: Size = 1407
    first_k_dense_replace: NoLayers | None = 0
    moe_layer_freq: Size = 1
    num_nextn_predict_layers: NoLayers | None = None

    def _head_width(self) -> int:
        return self.qk_nope_head_dim

    def _own_fields(self) -> Fields:
        return {
            "multi_latent_attention": True,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_head_dim": self.qk_nope_head_dim,
            "qk_pos_emb_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "mtp_num_layers": self.num_nextn_predict_layers or 0,
            **self._expert_fields(),
        }

    def _expert_fields(self) -> Fields:
        layers, first = self.num_hidden_layers, self.first_k_dense_replace or 0
        dense = {layer for layer in range(layers) if layer < first or layer % self.moe_layer_freq}
        if not self.n_routed_experts or len(dense) == layers:
            return {}
        first_dense = _first_dense(dense, "moe_layer_freq", self.moe_layer_freq)
        shared = (self.n_shared_experts or 0) * self.moe_intermediate_size
        return {
            **_experts(self.n_routed_experts, self.num_experts_per_tok or 0, self.moe_intermediate_size),
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_first_dense_layers": first_dense,
        }


class DeepseekV3(DeepseekV2):
    """deepseek_v3."""

    n_routed_experts: NoSize | None = 256
    n_shared_experts: NoSize | None = 1
    num_experts_per_tok: Size | None = 8
    moe_intermediate_size: Size = 2048
    first_k_dense_replace: NoLayers | None = 3


FAMILIES: Mapping[str, type[Family]] = {
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "gemma": Gemma,
    "gpt_oss": GptOss,
    "llama": Family,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}
"""`model_type` -> how to read it."""


def model_of_config(config: Mapping[str, Any], *, name: str, file: str) -> Model:
    """Return the model that a config.json describes; of one with several parts, the text model. Raises SpecError."""
    at: KeyPath = ()
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config, at = {**outer, **inner}, ("text_config",)
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        problem = f"{'is missing' if kind is None else 'is unknown'}; known: {', '.join(FAMILIES)}"
        fix = "or write the shape inline in the spec"
        raise spec_error((*at, "model_type"), problem, value=kind, fix=fix, file=file)
    try:
        model = Model(name=name, **checked(family, config, at=at).fields())
        check_model(model, at=at, names=NAMES)
    except SpecError as error:
        found = error
    else:
        return model
    raise joined(
        [spec_error(each.key, each.problem, value=each.value, fix=each.fix, file=file) for each in found.problems]
    )


def _experts(experts: int, topk: int, width: int) -> Fields:
    return {"num_moe_experts": experts, "moe_router_topk": topk, "moe_ffn_hidden_size": width}


def _first_dense(dense: set[int], key: str, value: object) -> int:
    """Return how many leading layers are dense. Raises SpecError if a dense layer follows one with experts."""
    if dense != set(range(len(dense))):
        problem = "puts dense layers behind layers with experts, which is not supported"
        raise spec_error(key, problem, value=value, fix="only leading layers can be dense")
    return len(dense)
