"""Attention widths, parameter counts and mean layers of a model, shared by all engines."""

from dataclasses import dataclass

import numpy as np

from flagcore.domain.model import Mixer, Model
from flagcore.domain.space import FloatArray


def widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of queries, keys and values, each in total over all heads."""
    heads = model.num_attention_heads
    if model.multi_latent_attention:
        query = heads * ((model.qk_head_dim or 0) + (model.qk_pos_emb_head_dim or 0))
        return query, query, heads * (model.v_head_dim or 0)
    key, value = (model.num_query_groups * size for size in (model.kv_channels, model.v_head_dim or model.kv_channels))
    return heads * model.kv_channels, key, value


def attended(model: Model) -> int:
    """Return the total width of the attention output over all heads."""
    return model.num_attention_heads * (model.v_head_dim or model.kv_channels)


def own_key_width(model: Model) -> int:
    """Return the width of the projections of one key head and its value, without latent attention."""
    return (0, model.kv_channels, cached_widths(model))[model.key_value_projections]


def layer_embeddings(model: Model) -> int:
    """Return the number of weights of the embeddings that each layer has of its own, and of their projections.

    Source: transformers 5.24 `models/gemma3n` (`embed_tokens_per_layer`, `per_layer_model_projection`,
    `per_layer_input_gate`, `per_layer_projection`).
    """
    return model.num_layers * model.layer_embedding_size * (model.vocab_size + 3 * model.hidden_size)


def cached_widths(model: Model) -> int:
    """Return the width of a cached key and value of one head, without latent attention. 0 if others cache them."""
    return (model.kv_channels + (model.v_head_dim or model.kv_channels)) * (model.key_value_projections > 0)


def latent_widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of latent attention: compressed queries (0: not compressed), keys with values, and rotary."""
    return model.q_lora_rank or 0, model.kv_lora_rank or 0, model.qk_pos_emb_head_dim or 0


def projection_weights(model: Model) -> tuple[int, int]:
    """Return the number of weights of the attention's input projections, in two parts.

    The first number is for the projections that compress the input for latent attention (else 0), the second for those
    to queries, keys and values.
    """
    h, query = model.hidden_size, widths(model)[0]
    if not model.multi_latent_attention:
        return 0, h * (query + model.num_query_groups * own_key_width(model))
    q_rank, kv_rank, rope = latent_widths(model)
    heads = model.num_attention_heads * ((model.qk_head_dim or 0) + (model.v_head_dim or 0))
    return h * (q_rank + kv_rank + rope), (q_rank or h) * query + kv_rank * heads


def cached_layers(
    model: Model, tokens: FloatArray | float, computed: FloatArray | float = 0.0, *, frees_windows: bool = True
) -> FloatArray | float:
    """Return how many full-attention layers would have a cache as large as the model's attention, for `tokens` tokens.

    Layers with a window cache fewer tokens, unless the engine does not free the others (`frees_windows`). While a
    prompt is processed, they also cache the `computed` tokens that are processed at once.
    """
    layers: FloatArray | float = float(model.attention_layers)
    for mixer, number in model.attention.items():
        if mixer.window is not None and frees_windows:
            share = np.minimum((mixer.window + computed) / np.maximum(tokens, 1.0), 1.0)
            layers = layers - (1.0 - share) * number
    return layers


def read_layers(model: Model, tokens: float) -> float:
    """Return how many full-attention layers would read as much as the model, for a token after `tokens` tokens."""
    layers = float(cached_layers(model, tokens))
    for mixer, number in model.attention.items():
        if mixer.indexer is not None:
            layers -= (1.0 - min(mixer.indexer.top_k / max(tokens, 1.0), 1.0)) * number
    return layers


def paired_layers(model: Model, tokens: float) -> float:
    """Return how many full-attention layers would have as many query-key pairs as the model, for `tokens` tokens."""
    layers = float(model.attention_layers)
    for mixer, number in model.attention.items():
        attended_tokens = mixer.window or (mixer.indexer and mixer.indexer.top_k)
        if attended_tokens:
            part = min(attended_tokens / max(tokens, 1.0), 1.0)
            layers -= (1.0 - part * (2.0 - part)) * number
    return layers


Share = FloatArray | float
"""A share of layers: of all candidates, or of each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLayer:
    """The parts of a model's layers after the leading dense ones, each as a share of these layers.

    `attentions`: layers with attention, by kind (`Model.by_attention`). `mixers`: layers with another mixer, by mixer.
    `dense` and `experts`: layers with a feed-forward network of one kind. All shares of a plain layer are 0 or 1.
    """

    attentions: tuple[tuple[Model, Share], ...]
    mixers: tuple[tuple[Mixer, Share], ...] = ()
    dense: Share = 0.0
    experts: Share = 0.0

    @property
    def attention(self) -> Share:
        """The share of layers with attention of any kind."""
        return sum(share for _, share in self.attentions)

    @property
    def feed_forward(self) -> Share:
        """The share of layers with a feed-forward network of any kind."""
        return self.dense + self.experts


def mean_layer(model: Model, *, experts: bool) -> MeanLayer:
    """Return the mean of a model's layers, of a model with `experts` that of the layers after the leading dense ones.

    The mixers are the mean of all layers.
    """
    if not model.layers:
        return MeanLayer(attentions=((model, 1.0),), dense=0.0 if experts else 1.0, experts=1.0 if experts else 0.0)
    rest = float(model.num_layers - model.moe_first_dense_layers)
    dense = (model.feed_forward_layers("dense") - model.moe_first_dense_layers) / rest
    return MeanLayer(
        attentions=tuple((each, each.attention_layers / model.num_layers) for each in model.by_attention),
        mixers=tuple((mixer, number / model.num_layers) for mixer, number in model.other_mixers.items()),
        dense=dense if experts or model.num_moe_experts is None else 1.0,
        experts=model.feed_forward_layers("experts") / rest if experts else 0.0,
    )
