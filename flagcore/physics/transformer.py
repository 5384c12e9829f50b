"""Attention widths, parameter counts and pipeline schedules, shared by all engines."""

from dataclasses import dataclass

import numpy as np

from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray


def widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of queries, keys and values, each in total over all heads."""
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        query = heads * ((model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0))
        return query, query, heads * (model.v_head_dim or 0)
    groups = model.num_query_groups * model.kv_channels
    return heads * model.kv_channels, groups, groups


def attended(model: Model) -> int:
    """Return the total width of the attention output over all heads."""
    return widths(model)[2] if model.multi_latent_attention else widths(model)[0]


def latent_widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of latent attention: compressed queries (0: not compressed), keys with values, and rotary."""
    return model.q_lora_rank or 0, model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0


def projection_weights(model: Model) -> tuple[int, int]:
    """Return the number of weights of the attention's input projections, in two parts.

    The first number is for the projections that compress the input for latent attention (else 0), the second for those
    to queries, keys and values.
    """
    h, (query, key, value) = model.hidden_size, widths(model)
    if not model.multi_latent_attention:
        return 0, h * (query + key + value)
    q_rank, kv_rank, rope = latent_widths(model)
    heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
    return h * (q_rank + kv_rank + rope), (q_rank or h) * query + kv_rank * heads


def cached_layers(model: Model, tokens: FloatArray | float, computed: FloatArray | float = 0.0) -> FloatArray | float:
    """Return how many full-attention layers would have a cache as large as the model's, for `tokens` tokens.

    Layers with a window cache fewer tokens. While a prompt is processed, they also cache the `computed` tokens that are
    processed at once.
    """
    if model.windows is None:
        return float(model.attention_layers)
    share = np.minimum((model.windows.tokens + computed) / np.maximum(tokens, 1.0), 1.0)
    layers: FloatArray = model.attention_layers - (1.0 - share) * model.windows.num_layers
    return layers


def read_layers(model: Model, tokens: float) -> float:
    """Return how many full-attention layers would read as much as the model, for a token after `tokens` tokens."""
    layers = float(cached_layers(model, tokens))
    return layers if model.indexer is None else layers * min(model.indexer.top_k / max(tokens, 1.0), 1.0)


def paired_layers(model: Model, tokens: float) -> float:
    """Return how many full-attention layers would have as many query-key pairs as the model, for `tokens` tokens."""

    def share(attended_tokens: int) -> float:
        part = min(attended_tokens / max(tokens, 1.0), 1.0)
        return part * (2.0 - part)

    layers = float(model.attention_layers)
    if model.windows is not None:
        layers -= (1.0 - share(model.windows.tokens)) * model.windows.num_layers
    return layers if model.indexer is None else layers * share(model.indexer.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The properties of a pipeline schedule.

    `parts`: the number of virtual stages per device. 0 means the number in the candidate.
    `copies`: the number of copies of parameters, gradients and optimizer state per device.
    `splits_backward`: whether the gradients of activations and of weights are computed in separate passes, so that
    kernels read their inputs twice.
    `post_validation`: whether stages skip the synchronization before the optimizer. The time of a step is then the
    longest time of one stage, from its first forward pass to its last backward pass.
    """

    parts: int = 1
    copies: int = 1
    splits_backward: bool = False
    post_validation: bool = False

    @property
    def folded(self) -> bool:
        """Whether device r of p holds the parts r and 2p - 1 - r, so that the first device also holds the last part."""
        return self.parts == 2 and self.copies == 1


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "interleaved": Schedule(parts=0),
    "zb-h1": Schedule(splits_backward=True),
    "zb-h2": Schedule(splits_backward=True, post_validation=True),
    "zb-1p": Schedule(splits_backward=True, post_validation=True),
    "zb-2p": Schedule(splits_backward=True, post_validation=True),
    "zb-v": Schedule(parts=2, splits_backward=True, post_validation=True),
    "v-half": Schedule(parts=2, splits_backward=True, post_validation=True),
    "v-min": Schedule(parts=2, splits_backward=True, post_validation=True),
    "dualpipe": Schedule(parts=2, copies=2, splits_backward=True),
    "dualpipev": Schedule(parts=2, splits_backward=True),
}
"""The supported schedules by name."""
