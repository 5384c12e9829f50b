"""Widths of attention, whatever the engine."""

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
