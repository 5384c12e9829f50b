"""The stages of a pipeline: their layers, micro-batches in flight at the memory peak, parameters per rank, and flops.

Numbers of parameters are given by component. A test compares them with modules that megatron-core 0.16 builds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from flagcore_models.layers import (
    depth_layer,
    depth_weights,
    experts_of,
    layer_embeddings,
    mixer_counts,
    network_counts,
    own_layers,
    without_repeats,
)
from flagcore_models.mixers.attention import Attention
from flagcore_models.networks.experts import Experts

from flagcore.domain.model import Mixer, Model
from flagcore.domain.model import Part as LayerPart
from flagcore.domain.prediction import ModelPart
from flagcore.domain.schedule import SCHEDULES
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training import schedules
from flagcore_training.adapters import adapter_weights
from flagcore_training.layout import DEFAULTS, ArrayRecord, Layout, Options, Training, distinct, pick
from flagcore_training.mixes import MeanLayer, Share, layer_kinds, mean_layer, mix, mixes_of
from flagcore_training.splits import Splits, StageLayers
from flagcore_training.vision import tower_flops, tower_weights

MTP = 5
"""Index of the field `mtp` of `Part` in the contents of a split."""


@dataclass(frozen=True, slots=True)
class Part(ArrayRecord):
    """The contents of one stage of each candidate.

    `first` is 1.0 if the stage has the embedding, `last` if it has the output head and the loss, `final_norm` if it has
    the final norm. `dense` is the number of its `layers` without experts, `mtp` its number of multi-token prediction
    (MTP) depths.
    """

    first: FloatArray
    last: FloatArray
    final_norm: FloatArray
    layers: FloatArray
    dense: FloatArray
    mtp: FloatArray


@dataclass(frozen=True, slots=True)
class Stage(Part):
    """One stage of each candidate.

    `mix` is its number of layers of each kind (`mixes`), empty if it has the mean of the model's layers. `chunk` is
    the number of layers of one virtual stage. `in_flight` is the number of micro-batches whose activations
    are stored at the peak, `deferred` the number of micro-batches that wait only for weight gradients, and `copies` the
    number of copies of the weights on a device.
    """

    index: FloatArray
    chunk: FloatArray
    in_flight: FloatArray
    deferred: FloatArray
    copies: FloatArray
    mix: tuple[FloatArray, ...] = ()

    @property
    def moe(self) -> FloatArray:
        return self.layers - self.dense


def stages(model: Model, layout: Layout, options: Options = DEFAULTS, starts: Sequence[FloatArray] = ()) -> list[Stage]:
    """Return the stages that can have the largest memory peak, in order, for all candidates.

    For candidates with shorter pipelines, the last stage is repeated.

    These are the first, the second and the last stage, each stage whose contents differ from the previous one, and
    `starts`, the first stages on other devices. Every other stage equals the previous one and stores fewer
    micro-batches, or has at most as many layers of each kind as another stage does. If options differ by stage, all
    stages are returned.
    """
    end, longest = layout.pipeline - 1.0, int(layout.pipeline.max(initial=1.0))
    indices, others = _distinct_stages(model, layout, options), [*starts, *_richest_stages(model, layout, options)]
    if others:
        indices = _each_once(np.stack([*indices, *others]), end)
    by_stage = options.offload_stages or options.schedule
    if by_stage or longest <= len(indices) + 1:
        indices = [np.minimum(end, float(number)) for number in range(longest - 1)]
    return [stage(model, layout, index, options) for index in (*indices, end)]


def _distinct_stages(model: Model, layout: Layout, options: Options) -> list[FloatArray]:
    """Return the indices of the first and the second stage, and of each stage that differs from the previous one."""
    end, number = layout.pipeline - 1.0, layout.split.astype(np.int64)
    even = [np.zeros_like(end), np.minimum(end, 1.0)]
    if experts_of(model) is not None and model.moe_first_dense_layers:
        chunk = _chunk_layers(model, layout, options)
        even.append(np.minimum(end, np.ceil(model.moe_first_dense_layers / np.maximum(chunk, 1.0))))
    if options.splits is None or not number.any():
        return even
    count = int(options.splits.distinct_counts[number].max())
    distinct_stages = options.splits.distinct_stages[number, :count].T
    if number.all():
        return [*distinct_stages]
    even += [end] * (count - len(even))
    return [np.where(number > 0, distinct_stages[min(place, count - 1)], each) for place, each in enumerate(even)]


def _each_once(indices: FloatArray, end: FloatArray) -> list[FloatArray]:
    """Return the indices of each candidate in order and without repetition, then `end` as often as others have more."""
    indices = np.sort(indices, axis=0)
    is_new = np.concatenate((np.ones_like(indices[:1], dtype=np.bool_), indices[1:] != indices[:-1])) & (indices < end)
    most = max(int(is_new.sum(axis=0).max(initial=0)), 1)
    return [*np.sort(np.where(is_new, indices, end), axis=0)[:most]]


def _richest_stages(model: Model, layout: Layout, options: Options) -> list[FloatArray]:
    """Return the first stage with the most layers of each kind, for a model whose stages differ in them."""
    if layer_kinds(model) is None:
        return []
    names = ("pipeline", "virtual", "split", "first_layers", "last_layers")
    first, index = distinct([getattr(layout, name) for name in names])
    few, longest = layout[first], int(layout.pipeline.max(initial=1.0))
    places = (np.minimum(few.pipeline - 1.0, float(number)) for number in range(longest))
    mixes = [stage(model, few, place, options).mix for place in places]
    return [np.argmax(each, axis=0).astype(np.float64)[index] for each in zip(*mixes, strict=True)]


def stage(model: Model, layout: Layout, index: FloatArray, options: Options = DEFAULTS) -> Stage:
    """Return stage `index` of each candidate.

    Candidates whose `Layout.split` is not 0 have the layers of that split. For the others, layers are split evenly,
    except for explicit numbers of the first and last stage. Embedding and loss count as one layer each if the options
    say so. If there is no even split, all stages but the last one have the number rounded up, as in usual layouts.
    """
    number = layout.split.astype(np.int64)
    place = np.where(number > 0, index, 0.0).astype(np.int64)  # other candidates may have longer pipelines
    if options.splits is None or not number.any():
        part = _even(model, layout, index, options)
    else:
        fields = options.splits.contents[number, place]
        part = Part(*fields.T)
        if not number.all():
            part = pick((number > 0).astype(np.int64), [_even(model, layout, index, options), part])
    found = stage_with(part, model, layout, index, options)
    if layer_kinds(model) is None:
        return found
    middle = _chunk_layers(model, layout, options) * layout.virtual
    head = np.where(layout.first_layers > 0, layout.first_layers, middle - options.account_for_embedding)
    before = np.where(index > 0, np.minimum(head + (index - 1.0) * middle, model.num_layers), 0.0)
    kinds = mix(model, before, part.layers, layout.virtual, SCHEDULES[options.schedule or "interleaved"])
    if options.splits is not None and number.any():
        own = options.splits.mixes[number, place].T
        kinds = tuple(np.where(number > 0, *each) for each in zip(own, kinds, strict=True))
    return replace(found, mix=kinds)


def stage_shares(model: Model, stage: Stage, *, moe: bool) -> tuple[Share, ...]:
    """Return which share of the layers of a stage that has a `mix` are of each kind.

    `moe`: of those after the leading dense ones, in a model with experts. The mixers are the mean of both.
    """
    kinds, has_experts = layer_kinds(model), experts_of(model) is not None
    layers, shares = np.maximum(stage.layers, 1.0), list[Share]()
    for part, count in zip(kinds.parts if kinds else (), stage.mix, strict=True):
        dense = 1.0 if part.kind == "dense" else 0.0
        if not has_experts or isinstance(part, Mixer):
            shares.append(count / layers)
        elif moe:
            shares.append(np.maximum(count - stage.dense * dense, 0.0) / np.maximum(stage.moe, 1.0))
        else:
            shares.append(dense)
    return tuple(shares)


def stage_layer(model: Model, stage: Stage, *, moe: bool) -> MeanLayer:
    """Return the mean layer of a stage, dense or, in a model with experts, after the leading dense ones."""
    kinds = layer_kinds(model) if stage.mix else None
    return mean_layer(model, experts=moe) if kinds is None else kinds.mean(stage_shares(model, stage, moe=moe))


def stage_of(
    train: Training,
    layout: Layout,
    index: FloatArray,
    layers: FloatArray,
    leading: IntArray | int = 0,
    norm: FloatArray | None = None,
    mtp: FloatArray | None = None,
) -> Stage:
    """Return stage `index` of each candidate with `layers` layers, of which the first `leading` ones are dense.

    The final norm and multi-token prediction are on the stages `norm` and `mtp`, by default on the last one.
    """
    last = layout.pipeline - 1.0
    part = Part(
        first=1.0 * (index == 0),
        last=1.0 * (index == last),
        final_norm=1.0 * (index == (last if norm is None else norm)),
        layers=layers,
        dense=layers if experts_of(train.model) is None else leading + np.zeros_like(layers),
        mtp=1.0 * (index == (last if mtp is None else mtp)) * train.model.mtp_num_layers,
    )
    return stage_with(part, train.model, layout, index, train.options)


def stage_with(part: Part, model: Model, layout: Layout, index: FloatArray, options: Options) -> Stage:
    """Return stage `index` of each candidate with the contents `part`."""
    deferred, copies = np.zeros_like(index), 1
    sizes = layout.pipeline, layout.virtual, layout.microbatches
    flight = schedules.in_flight(options.schedule or "interleaved", index, *sizes)
    uneven = np.flatnonzero((layout.split > 0) & (layout.virtual > 1) & (part.layers > 0))
    if uneven.size:
        flight[uneven] = _of_uneven(model, layout[uneven], part[uneven], index[uneven], flight[uneven])
    if options.schedule:
        deferred = schedules.deferred(options.schedule, index, layout.pipeline, layout.microbatches)
        copies = SCHEDULES[options.schedule].copies
    return Stage(
        **{each.name: getattr(part, each.name) for each in fields(part)},
        index=index,
        chunk=part.layers / layout.virtual,
        in_flight=flight,
        deferred=deferred,
        copies=np.full_like(index, float(copies)),
    )


def placed(model: Model, layout: Layout, options: Options, stages: Sequence[StageLayers]) -> tuple[Layout, Options]:
    """Return the layout and the options, changed to the explicit layer split `stages`.

    Only candidates that have as many (virtual) stages as `stages` change.
    """
    fits = layout.pipeline * layout.virtual == len(stages)
    lengths = np.unique(layout.pipeline[fits]).astype(np.int64)
    number = np.where(fits, 1.0 + np.searchsorted(lengths, layout.pipeline), 0.0)
    splits = splits_of(model, [(stages, length) for length in lengths.tolist()])
    return replace(layout, split=number), replace(options, splits=splits)


def splits_of(
    model: Model, splits: Sequence[tuple[Sequence[StageLayers], int]], before: Splits | None = None
) -> Splits:
    """Return the splits with these contents of (virtual) stages in model order, each with a number of devices."""
    size = len(splits), max((length for _, length in splits), default=1)
    found = [_contents(model, stages, length) for stages, length in splits]
    contents, mixes = (np.zeros((*size, each.shape[1])) for each in _contents(model, (StageLayers(),), 1))
    chunks = np.zeros((len(splits), max((len(stages) for stages, _ in splits), default=1)))
    for row, (stages, length) in enumerate(splits):
        contents[row, :length], mixes[row, :length] = found[row]
        chunks[row, : len(stages)] = [each.layers for each in stages]
    counts = np.array([float(length) for _, length in splits])
    return Splits.from_contents(contents, counts, chunks, mixes, before, exact=True)


def _contents(model: Model, stages: Sequence[StageLayers], length: int) -> tuple[FloatArray, FloatArray]:
    """Return the contents of each of `length` devices, and its number of layers of each kind."""
    table = np.array([(s.embedding, s.loss, s.layers, s.mtp) for s in stages], dtype=np.float64)
    before = np.concatenate(([0.0], np.cumsum(table[:, 2])[:-1]))
    leading = np.clip(model.moe_first_dense_layers - before, 0.0, table[:, 2])
    if experts_of(model) is None:
        leading = table[:, 2]
    norm = table[:, 1]
    if model.mtp_num_layers:
        norm = (np.arange(len(table)) == np.flatnonzero(table[:, 2]).max(initial=0)).astype(np.float64)
    columns = np.column_stack((table[:, :2], norm, table[:, 2], leading, table[:, 3]))
    return columns.reshape(-1, length, columns.shape[1]).sum(axis=0), mixes_of(model, table[:, 2], length)


def depths_received(model: Model, stage: Stage) -> FloatArray:
    """Return the number of multi-token prediction depths that the stage with the loss receives from another stage."""
    return stage.last * (model.mtp_num_layers - stage.mtp)


def layers_before_last(model: Model, layout: Layout) -> FloatArray:
    """Return the maximum number of layers on the last device, without the layers of its last virtual stage.

    These virtual stages have as many layers as in an even split.
    """
    return np.ceil(model.num_layers / (layout.pipeline * layout.virtual)) * (layout.virtual - 1.0)


def _of_uneven(model: Model, layout: Layout, part: Part, index: FloatArray, flight: FloatArray) -> FloatArray:
    """Return the number of micro-batches in flight if virtual stages differ in their numbers of layers.

    The unit is a whole stage. A device runs `pipeline` micro-batches through its first virtual stage, then through the
    next one. The first virtual stages have one layer more. On the last device, each virtual stage but the last has the
    layers of an even split.
    """
    size, virtual, layers = layout.pipeline, layout.virtual, part.layers
    rounds = np.floor(flight / size)
    remaining = (flight - rounds * size) * virtual
    chunk_layers = np.floor(layers / virtual)
    layers_in_flight = remaining * chunk_layers + np.minimum(remaining, (layers - chunk_layers * virtual) * size)
    earlier_chunks = virtual - 1.0
    alone = (part.mtp == 0) & (model.mtp_num_layers > 0)  # it has the loss; MTP is on an earlier stage
    last_chunk = np.where(alone, 0.0, np.clip(layers - layers_before_last(model, layout), 0.0, layers))
    current = np.minimum(remaining, earlier_chunks * size)
    on_last = current * (layers - last_chunk) / earlier_chunks + (remaining - current) * last_chunk
    held_layers = rounds * size * layers + np.where(part.last > 0, on_last, layers_in_flight)
    return held_layers / layers


def _even(model: Model, layout: Layout, index: FloatArray, options: Options) -> Part:
    end, chunk = layout.pipeline - 1.0, _chunk_layers(model, layout, options)
    first, last = (index == 0).astype(np.float64), (index == end).astype(np.float64)
    middle = chunk * layout.virtual
    head = np.where(layout.first_layers > 0, layout.first_layers, middle - options.account_for_embedding)
    middle_layers = model.num_layers - head - middle * np.maximum(end - 1.0, 0.0)
    tail = np.where(layout.last_layers > 0, layout.last_layers, np.maximum(middle_layers, 0.0))
    layers = np.where(first > 0, head, np.where(last > 0, tail, middle))
    layers = np.where(end > 0, layers, float(model.num_layers))
    dense = layers
    if experts_of(model) is not None:
        dense = np.minimum(_leading_dense(model, layout, index, head, chunk), layers)
    if options.schedule and SCHEDULES[options.schedule].folded:
        last = first
    if options.schedule == "dualpipe":
        first = last = np.maximum(first, last)
    norm = last
    if model.mtp_num_layers and options.account_for_loss:
        # the final norm follows the last layer, which may be before the stage of the loss
        norm = np.where((chunk == 1) & (end > 0), (index == end - 1.0).astype(np.float64), last)
    return Part(first, last, norm, layers, dense, last * model.mtp_num_layers)


def _chunk_layers(model: Model, layout: Layout, options: Options) -> FloatArray:
    """Return the number of layers of one virtual stage in the middle of the pipeline."""
    fixed_first, fixed_last = layout.first_layers > 0, layout.last_layers > 0
    unset_stages = layout.pipeline - fixed_first - fixed_last
    counted = model.num_layers + options.account_for_embedding + options.account_for_loss
    spread = counted - layout.first_layers - layout.last_layers
    return np.ceil(spread / np.maximum(unset_stages * layout.virtual, 1.0))


def _leading_dense(model: Model, layout: Layout, index: FloatArray, head: FloatArray, chunk: FloatArray) -> FloatArray:
    """Return the number of leading dense layers on stage `index`. Virtual stages alternate over the devices."""
    first_chunk = np.maximum(
        np.where(layout.first_layers > 0, head / layout.virtual, head - (layout.virtual - 1.0) * chunk), 0.0
    )
    chunk = np.maximum(chunk, 1.0)
    count = np.zeros_like(index)
    for layer in range(model.moe_first_dense_layers):
        place = np.where(layer < first_chunk, 0.0, 1.0 + (layer - first_chunk) // chunk)
        count += place % layout.pipeline == index
    return count


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


def layer_parameters(train: Training, layout: Layout, *, moe: bool, stage: Stage | None = None) -> Parts:
    """Return the number of weights of one layer on one rank, by component: of a model's mean layer, or of a stage's."""
    mean = mean_layer(train.model, experts=moe) if stage is None else stage_layer(train.model, stage, moe=moe)
    return mean_parameters(train, layout, mean)


def mean_parameters(train: Training, layout: Layout, mean: MeanLayer) -> Parts:
    """Return the number of weights of a mean layer on one rank, by component.

    Tensor-parallel ranks have whole the products without a split. Of those that compress the input of latent attention,
    this holds for transformer-engine's layers only. Each part has a norm before it. Source: megatron-core 0.16
    (`attention.py`, `multi_latent_attention.py`, `mlp.py`, `moe/`).
    """
    model, tensor = train.model, layout.tensor
    parts = dict.fromkeys(("qkv_proj", "out_proj"), np.zeros_like(tensor))
    norms: Share = 0.0
    for part, share in mean.parts:
        norms = norms + share * (model.hidden_size + model.residual_weights + part.norm_weights)
        add_parts(parts, part_weights(train, layout, part), share)
    parts["norms"] = norms + np.zeros_like(tensor)
    if train.options.adapter:
        parts["adapters"], parts["expert_adapters"] = adapter_weights(train, layout, mean)
    return parts


def part_weights(train: Training, layout: Layout, part: LayerPart) -> Parts:
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
    layout: Layout,
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
    model = train.model
    table = padded_vocab(model, layout.tensor) * model.hidden_size / layout.tensor
    is_only_stage = first * last
    head = last if model.untie_embeddings_and_output_weights else last - is_only_stage
    copies = np.maximum(first, mtp)
    norms = model.hidden_size * (last if norm is None else norm)
    own = sum(each.weights for each in layer_embeddings(model)) * first / layout.tensor
    parts = {"embedding": table * copies + own, "output_head": table * head, "norms": norms}
    if train.tower is not None:
        parts["vision"] = tower_weights(train.tower, layout)[0] * first
    return parts


def depth_mean(model: Model) -> MeanLayer:
    """Return the layer of a depth of multi-token prediction."""
    return MeanLayer.of_parts((part, 1.0) for part in depth_layer(model).parts)


def mtp_parameters(train: Training, layout: Layout) -> Parts:
    """Return the number of weights of all multi-token prediction depths, by component. Source: megatron-core 0.16."""
    model, depths = train.model, train.model.mtp_num_layers
    layer = mean_parameters(train, layout, depth_mean(model))
    extra_weights = (depth_weights(model) - 3 * model.hidden_size) / layout.tensor + 3 * model.hidden_size
    dense = sum((count for name, count in layer.items() if name not in EXPERT_PARTS + ADAPTER_PARTS), extra_weights)
    depths = 1 if model.mtp_use_repeated_layer else depths
    return {"mtp": depths * dense, "experts": depths * layer.get("experts", np.zeros_like(dense))}  # without adapters


def own_share(model: Model) -> float:
    """Return the share of layers that have weights of their own. The others repeat them, alike on all stages."""
    return len(own_layers(model)) / model.num_layers


def stage_parameters(train: Training, layout: Layout, stage: Stage) -> Parts:
    """Return the number of weights of one stage on one rank, by component."""
    model, copies = train.model, stage.copies * own_share(train.model)
    parts = edge_parameters(
        train, layout, first=stage.first, last=stage.last, mtp=(stage.mtp > 0).astype(np.float64), norm=stage.final_norm
    )
    add_parts(parts, layer_parameters(train, layout, moe=False, stage=stage), stage.dense * copies)
    if experts_of(model) is not None:
        add_parts(parts, layer_parameters(train, layout, moe=True, stage=stage), stage.moe * copies)
    if model.mtp_num_layers:
        add_parts(parts, mtp_parameters(train, layout), stage.mtp / model.mtp_num_layers)
    return parts


def layer_input_bytes(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes of the tensor between two layers: full recompute stores it, and pipeline stages send it."""
    width = train.model.residual_streams * train.model.hidden_size
    return train.value_bytes * width * layout.token_rows(train.sequence)


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
    depths, depth = model.mtp_num_layers, depth_layer(model)
    if depth.mixer is not None:
        scores += depths * depth.mixer.core_flops(sequence) / 2.0
    mtp = depths * (sum(_used_weights(model, part) for part in depth.parts) + depth_weights(model))
    weights = layers + mtp + model.hidden_size * model.vocab_size * (1 + depths)
    flops_per_weight = 4.0 if train.options.adapter else 6.0
    of_tower = 0.0 if train.tower is None else train.global_batch * tower_flops(train.tower)
    return train.global_batch * train.sequence * (flops_per_weight * weights + 6.0 * scores) + of_tower


def _used_weights(model: Model, part: LayerPart) -> float:
    """Return the weights of a part that a token uses: of routed experts, those that it chooses. Routers do not
    count."""
    total, chosen = float(part.other_weights), part.chosen if isinstance(part, Experts) else 1
    for each in part.products(model.hidden_size):
        if each.name != "router":
            total += each.inputs * each.outputs * (chosen if each.component in EXPERT_PARTS else 1)
    return total


def add_parts(total: Parts, parts: Parts, factor: FloatArray | float = 1.0) -> None:
    """Add each component of `parts`, multiplied by `factor`, to `total` in place."""
    for name, value in parts.items():
        total[name] = total[name] + value * factor if name in total else value * factor


def parts_of_model(train: Training, layout: Layout | None = None) -> tuple[ModelPart, ...]:
    """Return the parts of a model, with the number of weights of each and how often it occurs.

    A part is a mixer or a network of one kind, for example. The norm before it belongs to it, the final norm to the
    output head. `layout`: one device that holds the whole model.
    """
    one = np.ones(1)
    tower, train = train.tower, replace(train, tower=None)
    if layout is None:
        sizes: dict[str, Any] = {each.name: one for each in fields(Layout) if each.name not in ("further", "here")}
        off = ("sharded_optimizer", "sequence_parallel", "selective", "uniform", "block", "first_layers", "last_layers")
        layout = Layout(**{**sizes, **dict.fromkeys((*off, "split", "expert_groups"), np.zeros(1))})
    model = without_repeats(train.model)
    train = replace(train, model=model, options=replace(train.options, adapter=None))
    edges = {name: float(each[0]) for name, each in edge_parameters(train, layout, first=one, last=one).items()}
    found = [ModelPart("Vision tower", tower.vision.weights, 1)] if tower else []
    found.append(ModelPart("Embedding", edges["embedding"], 1))
    mixers = sorted(mixer_counts(model).items(), key=lambda each: not isinstance(each[0], Attention))
    networks = sorted(network_counts(model).items(), key=lambda each: each[0].kind, reverse=True)
    counts: dict[tuple[str, float], int] = {}  # windows differ in no weights
    for part, number in (*mixers, *networks):
        weights = sum(float(each[0]) for each in part_weights(train, layout, part).values())
        key = part.label, weights + model.hidden_size + model.residual_weights + part.norm_weights
        counts[key] = counts.get(key, 0) + number
    found += [ModelPart(name, weights, number) for (name, weights), number in counts.items()]
    if model.mtp_num_layers:
        mtp_weights = sum(float(each[0]) for each in mtp_parameters(train, layout).values())
        found.append(ModelPart("MTP", mtp_weights / model.mtp_num_layers, model.mtp_num_layers))
    found.append(ModelPart("Output", sum(edges.values()) - edges["embedding"], 1))
    return tuple(found)
