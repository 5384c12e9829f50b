"""Widths and weights of attention, for any engine."""

from __future__ import annotations

from flagcore.domain.model import Model


def widths(model: Model) -> tuple[int, int, int]:
    """Return the total width over heads of queries, of keys and of values."""
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        query = heads * ((model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0))
        return query, query, heads * (model.v_head_dim or 0)
    groups = model.num_query_groups * model.kv_channels
    return heads * model.kv_channels, groups, groups


def attended(model: Model) -> int:
    """Return the total width of the attention output."""
    return widths(model)[2] if model.multi_latent_attention else widths(model)[0]


def latent_widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of latent attention: compressed queries (0: not compressed), keys with values, and rotary."""
    return model.q_lora_rank or 0, model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0


def projection_weights(model: Model) -> tuple[int, int]:
    """Return the weights that compress the input for latent attention (else 0), and those that project to queries,
    keys and values.
    """
    h, (query, key, value) = model.hidden_size, widths(model)
    if not model.multi_latent_attention:
        return 0, h * (query + key + value)
    q_rank, kv_rank, rope = latent_widths(model)
    heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
    return h * (q_rank + kv_rank + rope), (q_rank or h) * query + kv_rank * heads
