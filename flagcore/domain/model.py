"""The architecture of a transformer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The architecture of a transformer. Sizes are numbers of elements; defaults are resolved.

    `ffn_hidden_size` is the FFN width of a dense layer, `moe_ffn_hidden_size` the width of a routed expert,
    `moe_shared_expert_intermediate_size` the total width of the shared experts. If a model has no MLA or MoE, its sizes
    are None; numbers of layers are 0.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    gated_linear_unit: bool = True
    untie_embeddings_and_output_weights: bool = True
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_first_dense_layers: int = 0
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    mtp_num_layers: int = 0
