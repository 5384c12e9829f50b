"""The stages of a pipeline: their layers, and micro-batches in flight at the memory peak."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from flagcore_models.layers import experts_of

from flagcore.domain.model import Mixer, Model
from flagcore.domain.schedule import SCHEDULES
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training import schedules
from flagcore_training.layout import DEFAULTS, ArrayRecord, Layout, Options, Training, distinct, pick
from flagcore_training.mixes import MeanLayer, Share, layer_kinds, mean_layer, mix, mixes_of
from flagcore_training.splits import Splits, StageLayers

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


def layer_input_bytes(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes of the tensor between two layers: full recompute stores it, and pipeline stages send it."""
    width = train.model.residual_streams * train.model.hidden_size
    return train.value_bytes * width * layout.token_rows(train.sequence)
