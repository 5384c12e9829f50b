"""Numbers of weights of layers, stages and models on one rank, by component, and the flops of a step.

A test compares the numbers with modules that megatron-core 0.16 builds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from flagcore_models.layers import (
    depth_of,
    embedding_of,
    head_of,
    layer_embeddings,
    mixer_counts,
    network_counts,
    own_layers,
    weights_around,
    without_repeats,
)
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts
from flagcore_models.parts.tower import VisionTower

from flagcore.domain.model import Layer, Model, Part, Product
from flagcore.domain.prediction import ModelPart
from flagcore.domain.space import FloatArray
from flagcore_training.adapters import adapter_weights
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import LayerSizes, Training
from flagcore_training.stages import Stage
from flagcore_training.vision import tower_flops, tower_weights

Parts = dict[str, FloatArray]
"""Values by component: one array each, with one element per candidate."""

VOCAB_MULTIPLE = 128
"""Default of Megatron-LM's argument `make_vocab_size_divisible_by`."""

EXPERT_PARTS = ("experts", "expert_adapters")
"""Components whose weights are replicated only over the expert-data-parallel group."""
ADAPTER_PARTS = ("adapters", "expert_adapters")
"""Components that are trained if weights are frozen."""


def padded_vocab(model: Model, tensor: FloatArray) -> FloatArray:
    """Return the vocabulary size, padded to a multiple of 128 times the tensor-parallel size as Megatron-LM does."""
    multiple = VOCAB_MULTIPLE * tensor
    return np.ceil(model.vocab_size / multiple) * multiple


def table_sizes(train: Training, tensor: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of weights of the embedding and of the output head on a rank, whose vocabulary is padded."""
    model, rows = train.model, padded_vocab(train.model, tensor)
    (table,), (head,) = (each.products(model.hidden_size) for each in (embedding_of(model), head_of(model)))
    return rows * table.outputs / tensor, rows * head.inputs / tensor


def layer_parameters(train: Training, layout: LayerSizes, layer: Layer) -> Parts:
    """Return the number of weights of a layer on one rank, by component.

    Tensor-parallel ranks have whole the products without a split. Of those that compress the input of latent attention,
    this holds for transformer-engine's layers only. Each part has a norm before it. Source: megatron-core 0.16
    `transformer/`.
    """
    zeros = np.zeros_like(layout.tensor)
    parts = dict.fromkeys(("qkv_proj", "out_proj"), zeros)
    for part in layer.parts:
        add_parts(parts, part_weights(train, layout, part))
    parts["norms"] = sum(weights_around(train.model, part) for part in layer.parts) + zeros
    if train.options.adapter:
        parts["adapters"], parts["expert_adapters"] = adapter_weights(train, layout, layer)
    return parts


def part_weights(train: Training, layout: LayerSizes, part: Part) -> Parts:
    """Return the number of weights of a part of a layer on one rank, by component, without its norms."""
    tensor, weights = layout.tensor, Parts()
    for each in part.products(train.model.hidden_size):
        ranks = tensor if each.split else np.ones_like(tensor)
        if each.component in EXPERT_PARTS:
            ranks = layout.expert * layout.expert_tensor
        elif each.name == "compression" and not train.transformer_engine:
            ranks = tensor
        add_parts(weights, {each.component: (each.weights + each.biases) / ranks})
    if part.other_weights:
        add_parts(weights, {"mixers": part.other_weights / tensor})
    return weights


def edge_parameters(
    train: Training,
    layout: LayerSizes,
    *,
    first: FloatArray,
    last: FloatArray,
    norm: FloatArray | None = None,
    mtp: FloatArray | float = 0.0,
) -> Parts:
    """Return the number of trained weights of a stage's embedding, final norm, output head, and vision tower.

    `first` and `last` are 1 for the first and last stage, `norm` for a stage with the final norm (None: the last
    stage), and `mtp` for a stage with multi-token prediction. With several stages, a tied head and multi-token
    prediction have their own copies of the embedding. Source: megatron-core 0.16 `gpt_model.py`,
    `transformer_block.py`.
    """
    model, head = train.model, head_of(train.model)
    table, of_head = table_sizes(train, layout.tensor)
    heads = last - first * last if head.tied else last  # the only stage has one table
    norms = head.norm_weights * (last if norm is None else norm)
    own = sum(each.weights for each in layer_embeddings(model)) * first / layout.tensor
    parts = {"embedding": table * np.maximum(first, mtp) + own, "output_head": of_head * heads, "norms": norms}
    if train.tower is not None:
        parts["vision"] = tower_weights(train.tower, layout)[0] * first
    return parts


def depth_parameters(train: Training, layout: LayerSizes) -> Parts:
    """Return the number of weights of one depth of multi-token prediction, by component, without adapters.

    Source: megatron-core 0.16.
    """
    depth = depth_of(train.model)
    layer = layer_parameters(train, layout, depth.layer)
    joined = sum(each.weights for each in depth.products(train.model.hidden_size))
    extra_weights = joined / layout.tensor + depth.norm_weights
    dense = sum((count for name, count in layer.items() if name not in EXPERT_PARTS + ADAPTER_PARTS), extra_weights)
    return {"mtp": dense, "experts": layer.get("experts", np.zeros_like(dense))}


def own_share(model: Model) -> float:
    """Return the share of layers that have weights of their own. The others repeat them, alike on all stages."""
    return len(own_layers(model)) / model.num_layers


def stage_parameters(train: Training, layout: LayerSizes, stage: Stage) -> Parts:
    """Return the number of weights of one stage on one rank, by component."""
    model, copies = train.model, stage.copies * own_share(train.model)
    parts = edge_parameters(
        train, layout, first=stage.first, last=stage.last, mtp=(stage.mtp > 0).astype(np.float64), norm=stage.final_norm
    )
    for layer, number in zip(layer_kinds(model).layers, stage.numbers, strict=True):
        add_parts(parts, layer_parameters(train, layout, layer), number * copies)
    if model.mtp_num_layers:
        add_parts(parts, depth_parameters(train, layout), stage.mtp * depth_of(model).own)
    return parts


def model_flops(train: Training) -> float:
    """Return the flops of forward and backward of one step, without recompute.

    Source: `num_floating_point_operations` of Megatron-LM core_v0.16. It has 6 flops per weight and token, the causal
    half of the attention scores (of those within windows, if layers have some), and no router. With adapters, the
    frozen weights have no gradients (4 flops), and the adapters themselves are not counted.
    """
    if train.lengths:  # as sequences of the length that has as many pairs of tokens
        samples = train.lengths.cut(train.sequence).astype(np.float64)
        alike = replace(train, sequence=round(float((samples**2).sum() / samples.sum())), lengths=None)
        return model_flops(alike) / alike.sequence * train.lengths.tokens(train.sequence)
    model, sequence = train.model, float(train.sequence)
    mixers, networks = mixer_counts(model), network_counts(model)
    layers = sum(number * _used_weights(model, part) for part, number in (*mixers.items(), *networks.items()))
    scores = sum(number * mixer.core_flops(sequence) for mixer, number in mixers.items()) / 2.0
    depth, (head,) = depth_of(model), head_of(model).products(model.hidden_size)
    if depth.layer.mixer is not None:
        scores += depth.count * depth.layer.mixer.core_flops(sequence) / 2.0
    mtp = depth.count * (sum(_used_weights(model, part) for part in (depth, *depth.layer.parts)) + depth.norm_weights)
    weights = layers + mtp + head.weights * (1 + depth.count)
    flops_per_weight = 4.0 if train.options.adapter else 6.0
    of_tower = 0.0 if train.tower is None else train.global_batch * tower_flops(train.tower)
    return train.global_batch * train.sequence * (flops_per_weight * weights + 6.0 * scores) + of_tower


def used_products(model: Model, parts: Iterable[tuple[Part, int]]) -> Iterator[tuple[Product, int]]:
    """Yield the products of these numbers of parts but routers, each with how many of it a token uses: of routed
    experts, those that it chooses."""
    for part, number in parts:
        for each in part.products(model.hidden_size):
            chosen = part.chosen if isinstance(part, Experts) and each.component in EXPERT_PARTS else 1
            if each.name != "router":
                yield each, number * chosen


def _used_weights(model: Model, part: Part) -> float:
    """Return the weights of a part that a token uses."""
    products = used_products(model, [(part, 1)])
    return float(part.other_weights + sum(number * each.inputs * each.outputs for each, number in products))


def add_parts(total: Parts, parts: Parts, factor: FloatArray | float = 1.0) -> None:
    """Add each component of `parts`, multiplied by `factor`, to `total` in place."""
    for name, value in parts.items():
        total[name] = total[name] + value * factor if name in total else value * factor


def parts_of_model(train: Training, layout: LayerSizes | None = None) -> tuple[ModelPart, ...]:
    """Return the parts of a model, with the number of weights of each and how often it occurs.

    A part is a mixer or a network of one kind, for example. The norm before it belongs to it, the final norm to the
    output head. `layout`: one device that holds the whole model.
    """
    one = np.ones(1)
    tower, train = train.tower, replace(train, tower=None)
    if layout is None:
        layout = LayerSizes(**dict.fromkeys(LayerSizes.__dataclass_fields__, one))
    model = without_repeats(train.model)
    train = replace(train, model=model, options=replace(train.options, adapter=None))
    edges = {name: float(each[0]) for name, each in edge_parameters(train, layout, first=one, last=one).items()}
    found = [ModelPart("Vision tower", VisionTower(vision=tower.vision).weights, 1)] if tower else []
    found.append(ModelPart("Embedding", edges["embedding"], 1))
    mixers = sorted(mixer_counts(model).items(), key=lambda each: not isinstance(each[0], Attention))
    networks = sorted(network_counts(model).items(), key=lambda each: each[0].kind, reverse=True)
    counts: dict[tuple[str, float], int] = {}  # windows differ in no weights
    for part, number in (*mixers, *networks):
        weights = sum(float(each[0]) for each in part_weights(train, layout, part).values())
        key = part.label, weights + weights_around(model, part)
        counts[key] = counts.get(key, 0) + number
    found += [ModelPart(name, weights, number) for (name, weights), number in counts.items()]
    if model.mtp_num_layers:
        mtp_weights = sum(float(each[0]) for each in depth_parameters(train, layout).values())
        found.append(ModelPart("MTP", mtp_weights * depth_of(model).own, model.mtp_num_layers))
    found.append(ModelPart("Output", sum(edges.values()) - edges["embedding"], 1))
    return tuple(found)
