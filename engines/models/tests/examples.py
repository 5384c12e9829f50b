"""Models for the tests of engines."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flagcore_models.layers import attention_of, layers_of, network_of
from flagcore_models.mixers.compressed_attention import CompressedAttention

from flagcore.domain.model import Layer, Mixer, Model

Kind = Mixer | Mapping[str, Any] | None
"""A mixer, or the sizes of softmax attention that differ from the model's; None: no mixer."""
COMPRESSED = CompressedAttention(num_heads=32, head_dim=128, query_rank=64, window=8, output_groups=4, output_rank=64)


def layer_of(model: Model, kind: Kind = {}, network: str = "dense", *, repeats: bool = False) -> Layer:  # noqa: B006
    """Return a layer of `model` with a mixer of this kind and with a network: "dense", "experts" or "" for none."""
    mixer = attention_of(model, **kind) if isinstance(kind, Mapping) else kind
    return Layer(mixer=mixer, network=network_of(model, network), repeats=repeats)


def mixed(model: Model, kind: Kind, number: int) -> Model:
    """Return `model` with another mixer in its first `number` layers."""
    mixer, layers = layer_of(model, kind).mixer, layers_of(model)
    return replace(model, layers=(*(replace(each, mixer=mixer) for each in layers[:number]), *layers[number:]))
