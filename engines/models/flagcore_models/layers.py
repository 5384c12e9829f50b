"""The layers of a model: what every engine counts weights, memory, operations and caches from.

A layer is a mixer and a feed-forward network, each with its list of products. `layers_of` gives those of any `Model`,
`around` what is before and after each of them, and `embedding_of`, `head_of`, `own_embeddings` and `depth_of` the parts
outside layers. The other functions are sums over them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flagcore.domain.model import Layer, Mixer, Model, Network, Part, Product
from flagcore_models.mixers.attention import Attention, Indexer
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_models.networks.dense import Dense
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.depth import Depth
from flagcore_models.parts.norm import Norm, Streams
from flagcore_models.parts.tables import Embedding, Head, LayerEmbeddings


def attention_of(model: Model, **changes: Any) -> Attention:
    """Return softmax attention with the sizes of a model, with other values of some fields of `Attention`.

    Of latent attention, `head_dim` is the part of a head without the position. `value_dim` is by default that of the
    model, or `head_dim`.
    """
    heads = changes.pop("num_heads", model.num_attention_heads)
    width = changes.pop("head_dim", None)
    value_dim = changes.pop("value_dim", None) or model.v_head_dim or width or model.kv_channels
    shared = {"gate": model.attention_output_gate, "qk_norm": model.qk_layernorm, "value_dim": value_dim, **changes}
    if model.kv_lora_rank:
        nope, rope = width or model.qk_head_dim or 0, model.qk_pos_emb_head_dim or 0
        sizes = {"latent_rank": model.kv_lora_rank or 0, "query_rank": model.q_lora_rank or 0, **shared}
        dims = {"head_dim": nope + rope, "nope_dim": nope, "rope_dim": rope}
        return LatentAttention(**{**sizes, **dims, "num_heads": heads, "groups": heads})
    sizes = {"groups": model.num_query_groups, "bias": model.add_qkv_bias, **shared}
    return Attention(**{**sizes, "num_heads": heads, "head_dim": width or model.kv_channels})


def dense_of(model: Model) -> Dense:
    """Return the feed-forward network of a model's dense layers."""
    return Dense(width=model.ffn_hidden_size, gated=model.gated_linear_unit)


def experts_of(model: Model) -> Experts | None:
    """Return the mixture of experts of a model's layers that have one. None for a model without experts."""
    if not model.experts:
        return None
    return Experts(
        width=model.moe_ffn_hidden_size or model.ffn_hidden_size,
        gated=model.gated_linear_unit,
        count=model.experts,
        chosen=model.moe_router_topk,
        shared=model.moe_shared_expert_intermediate_size or 0,
        latent=model.moe_latent_size or 0,
        groups=model.moe_router_num_groups,
        chosen_groups=model.moe_router_group_topk,
        bias=model.moe_bias,
    )


def network_of(model: Model, kind: str) -> Network | None:
    """Return the network of a kind, "dense", "experts" or "" (none)."""
    return dense_of(model) if kind == "dense" else experts_of(model) if kind else None


@lru_cache(maxsize=256)
def layers_of(model: Model) -> tuple[Layer, ...]:
    """Return all layers of a model, in order."""
    if model.layers:
        return model.layers
    attention, dense, experts = attention_of(model), dense_of(model), experts_of(model)
    leading = model.num_layers if experts is None else model.moe_first_dense_layers
    first, rest = (Layer(mixer=attention, network=each) for each in (dense, experts))
    return (first,) * leading + (rest,) * (model.num_layers - leading)


def own_layers(model: Model) -> tuple[Layer, ...]:
    """Return the layers that have weights of their own: all but those that repeat others."""
    return tuple(each for each in layers_of(model) if not each.repeats)


@lru_cache(maxsize=256)
def layer_counts(model: Model) -> Mapping[Layer, int]:
    """Return the distinct layers of a model in order, with the number of each."""
    return Counter(layers_of(model))


@lru_cache(maxsize=256)
def mixer_counts(model: Model) -> Mapping[Mixer, int]:
    """Return the distinct mixers of a model in order, with the number of layers of each."""
    return Counter(each.mixer for each in layers_of(model) if each.mixer is not None)


@lru_cache(maxsize=256)
def network_counts(model: Model) -> Mapping[Network, int]:
    """Return the distinct feed-forward networks of a model in order, with the number of layers of each."""
    return Counter(each.network for each in layers_of(model) if each.network is not None)


@lru_cache(maxsize=256)
def product_counts(model: Model) -> Mapping[Product, int]:
    """Return the distinct products of a model's layers in order, with the number of each."""
    found: Counter[Product] = Counter()
    for layer, number in layer_counts(model).items():
        for part in layer.parts:
            for product in part.products(model.hidden_size):
                found[product] += number
    return found


def other_weights(model: Model) -> int:
    """Return the weights of a model's layers in no product, which tensor-parallel ranks divide. Norms do not count."""
    return sum(number * part.other_weights for each, number in layer_counts(model).items() for part in each.parts)


def attention_counts(model: Model) -> Mapping[Attention, int]:
    """Return the distinct kinds of softmax attention of a model, with the number of layers of each."""
    return {each: number for each, number in mixer_counts(model).items() if isinstance(each, Attention)}


@lru_cache(maxsize=256)
def attention_by_size(model: Model) -> Mapping[Attention, Mapping[Attention, int]]:
    """Return the distinct kinds of softmax attention of a model, whatever their windows.

    The value of each: those with any window, with the number of layers of each.
    """
    found: dict[Attention, dict[Attention, int]] = {}
    for each, number in attention_counts(model).items():
        found.setdefault(replace(each, window=None), {})[each] = number
    return found


def other_mixers(model: Model) -> dict[Mixer, int]:
    """Return the distinct mixers of a model but softmax attention, with the number of layers of each."""
    return {each: number for each, number in mixer_counts(model).items() if not isinstance(each, Attention)}


def indexer_of(model: Model) -> Indexer | None:
    """Return the indexer of the first kind of sparse attention. None if there is none."""
    return next((each.indexer for each in attention_counts(model) if each.indexer), None)


def latent_layers(model: Model) -> int:
    """Return the number of layers with latent attention."""
    return sum(number for each, number in attention_counts(model).items() if isinstance(each, LatentAttention))


def sparse_latent(model: Model) -> LatentAttention | None:
    """Return the latent attention of a model whose keys an indexer chooses. None if there is none."""
    return next((each for each in attention_counts(model) if isinstance(each, LatentAttention) and each.indexer), None)


def state_bytes(model: Model) -> float:
    """Return the bytes of the largest recurrent state that a layer has for a sequence. 0 if no layer has one."""
    return max((each.state_bytes for each in mixer_counts(model) if each.recurrent), default=0.0)


@lru_cache(maxsize=256)
def depth_of(model: Model) -> Depth:
    """Return a depth of multi-token prediction: its layer has the last attention, if any, and the experts."""
    mixers = [each.mixer for each in layers_of(model) if each.mixer is not None]
    mixer = next((each for each in reversed(mixers) if isinstance(each, Attention)), mixers[-1] if mixers else None)
    experts = None if model.mtp_dense else experts_of(model)
    layer = Layer(mixer=mixer, network=experts or dense_of(model))
    shared, width = model.mtp_use_repeated_layer, model.hidden_size
    return Depth(layer=layer, shared=shared, width=width, count=model.mtp_num_layers)


def streams_of(model: Model) -> Streams | None:
    """Return the hyper-connection around each mixer and network. None if there is one residual stream."""
    several = model.residual_streams > 1
    return Streams(width=model.residual_weights, count=model.residual_streams) if several else None


def around(model: Model) -> tuple[Norm, ...]:
    """Return what is around each mixer and network of a model: a norm, and residual streams if it has several."""
    return (Norm(width=model.hidden_size), *filter(None, [streams_of(model)]))


def weights_around(model: Model, part: Part) -> int:
    """Return the weights of the norms and residual streams in a part and around it, which each rank has whole."""
    return sum(each.norm_weights for each in (part, *around(model)))


def embedding_of(model: Model) -> Embedding:
    """Return the embedding of a model."""
    return Embedding(vocabulary=model.vocab_size)


def head_of(model: Model) -> Head:
    """Return the output head of a model, with the final norm and the loss."""
    shared = not model.untie_embeddings_and_output_weights
    sizes = {"logits": model.vocab_size, "width": model.hidden_size, "cap_bytes": model.logit_cap_bytes}
    return Head(**sizes, tied=shared)


def own_embeddings(model: Model) -> LayerEmbeddings | None:
    """Return the embeddings that each layer has of its own. None if there are none."""
    sizes = {"vocabulary": model.vocab_size, "layers": model.num_layers, "width": model.layer_embedding_size}
    return LayerEmbeddings(**sizes) if model.layer_embedding_size else None


def layer_embeddings(model: Model) -> tuple[Product, ...]:
    """Return the products of the layers' own embeddings, if there are any. The first one is a table."""
    own = own_embeddings(model)
    return own.products(model.hidden_size) if own else ()


def table_products(model: Model) -> tuple[Product, ...]:
    """Return the products outside layers: the embedding, the output head unless it is tied, and those of the layers'
    own embeddings."""
    (table,), (head,) = (part.products(model.hidden_size) for part in (embedding_of(model), head_of(model)))
    return (table, *[head] * (not head_of(model).tied), *layer_embeddings(model))


@lru_cache(maxsize=256)
def connections(model: Model) -> int:
    """Return the number of mixers and networks with weights, each of which reads and writes the residual streams."""
    return sum(len(each.parts) for each in own_layers(model))


def weights_by_group(model: Model) -> dict[str, int]:
    """Return the weights of the parts that a checkpoint may quantize alike, by group of `Product`.

    "": those that stay in 16 bits: tables, routers, residual connections. Biases and norms, below 0.1% of a model, and
    multi-token prediction are not included.
    """
    own = without_repeats(model)
    streams = streams_of(model)
    found = Counter({"": connections(model) * streams.norm_weights if streams else 0})
    for product, number in (*product_counts(own).items(), *((each, 1) for each in table_products(model))):
        found[product.group] += number * product.weights
    found["attention"] += other_weights(own)
    return found


def parameters(model: Model) -> int:
    """Return the number of weights of a model without multi-token prediction, biases and norms."""
    return sum(weights_by_group(model).values())


def without_repeats(model: Model) -> Model:
    """Return this model with all weights once: without the layers that repeat others."""
    layers = tuple(each for each in model.layers if not each.repeats)
    return model if len(layers) == len(model.layers) else replace(model, num_layers=len(layers), layers=layers)
