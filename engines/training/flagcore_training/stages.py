"""The stages of a pipeline: their node groups, their layers, and micro-batches in flight at the memory peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray, IntArray
from flagcore_training import schedules
from flagcore_training.kinds import Numbers, layer_kinds
from flagcore_training.layout import DEFAULTS, ArrayRecord, Layout, Options, Training, distinct, pick
from flagcore_training.schedules import SCHEDULES
from flagcore_training.splits import Splits, StageLayers

T = TypeVar("T")


class StageGroups(NamedTuple):
    """The node group of each stage, and the layout on each group.

    `starts` are the first stages of all groups but the first. `starts` and `layouts` have one array or record of
    candidates per group. With equal sizes, stage i of p has the ranks i W/p to (i+1) W/p of W. The caller guarantees
    that no stage spans two groups.
    """

    starts: tuple[FloatArray, ...]
    layouts: tuple[Layout, ...]

    @classmethod
    def from_layout(cls, layout: Layout, costs: Costs) -> StageGroups:
        if layout.further:
            starts, layouts = zip(*((each.start, each.layout) for each in layout.further), strict=True)
            return cls(starts, (layout, *layouts))
        size = layout.tensor * layout.context * layout.data
        end = layout.pipeline - 1.0
        starts = tuple(np.minimum(np.ceil(first / size), end) for first in costs.further)
        return cls(starts, (layout,) * len(costs.groups))

    def group(self, index: FloatArray) -> IntArray:
        number = np.zeros(index.shape, dtype=np.int64)
        for start in self.starts:
            number += index >= start
        return number

    def pick(self, index: FloatArray, values: Sequence[T]) -> T:
        """Return, for each candidate, the value of the node group of stage `index`.

        `values` has one entry per group.
        """
        return values[0] if len(values) == 1 else pick(self.group(index), values)

    def stages(self, layout: Layout) -> list[FloatArray]:
        edges = (np.zeros_like(layout.pipeline), *self.starts, layout.pipeline)
        return [after - before for before, after in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Stage(ArrayRecord):
    """One stage of each candidate.

    `first` is 1.0 if the stage has the embedding, `last` if it has the output head and the loss, `final_norm` if it has
    the final norm. `leading` is the number of its `layers` before the model's first layer with experts, `mtp` its
    number of multi-token prediction (MTP) depths, and `numbers` its number of layers of each kind (`LayerKinds`).
    `chunk` is the number of layers of one virtual stage. `in_flight` is the number of micro-batches whose activations
    are stored at the peak, `deferred` the number of micro-batches that wait only for weight gradients, and `copies` the
    number of copies of the weights on a device.
    """

    first: FloatArray
    last: FloatArray
    final_norm: FloatArray
    layers: FloatArray
    leading: FloatArray
    mtp: FloatArray
    numbers: Numbers
    index: FloatArray
    chunk: FloatArray
    in_flight: FloatArray
    deferred: FloatArray
    copies: FloatArray

    @property
    def later(self) -> FloatArray:
        """The number of layers after the leading ones."""
        return self.layers - self.leading

    def of_groups(self, count: int) -> tuple[FloatArray, ...]:
        """Return the numbers of layers of the `count` groups of the model (`LayerKinds`)."""
        return (self.layers,) if count == 1 else (self.leading, self.later)


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
    if model.moe_first_dense_layers:
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
    if layer_kinds(model).are_plain:
        return []
    names = ("pipeline", "virtual", "split", "first_layers", "last_layers")
    first, index = distinct([getattr(layout, name) for name in names])
    few, longest = layout[first], int(layout.pipeline.max(initial=1.0))
    places = (np.minimum(few.pipeline - 1.0, float(number)) for number in range(longest))
    numbers = [stage(model, few, place, options).numbers for place in places]
    return [np.argmax(each, axis=0).astype(np.float64)[index] for each in zip(*numbers, strict=True)]


def stage(model: Model, layout: Layout, index: FloatArray, options: Options = DEFAULTS) -> Stage:
    """Return stage `index` of each candidate.

    Candidates whose `Layout.split` is not 0 have the layers of that split. For the others, layers are split evenly,
    except for explicit numbers of the first and last stage. Embedding and loss count as one layer each if the options
    say so. If there is no even split, all stages but the last one have the number rounded up, as in usual layouts.
    """
    number = layout.split.astype(np.int64)
    if options.splits is None or not number.any():
        contents = _even(model, layout, index, options)
    else:
        place = np.where(number > 0, index, 0.0).astype(np.int64)  # other candidates may have longer pipelines
        contents = [*options.splits.contents[number, place].T]
        if not number.all():
            contents = [*np.where(number > 0, contents, _even(model, layout, index, options))]
    return _with_contents(model, layout, index, options, contents)


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

    The other layers are the mean of the model's. The final norm and multi-token prediction are on the stages `norm` and
    `mtp`, by default on the last one.
    """
    last, leading_layers = layout.pipeline - 1.0, leading + np.zeros_like(layers)
    ends = [1.0 * (index == (last if place is None else place)) for place in (0.0, None, norm, mtp)]
    sizes = *ends[:3], layers, leading_layers, ends[3] * train.model.mtp_num_layers
    numbers = layer_kinds(train.model).mean(layers, leading_layers)
    return _with_contents(train.model, layout, index, train.options, [*sizes, *numbers])


def _with_contents(
    model: Model, layout: Layout, index: FloatArray, options: Options, contents: Sequence[FloatArray]
) -> Stage:
    """Return stage `index` of each candidate with the contents of a split (`Splits`)."""
    first, last, final_norm, layers, leading, mtp, *numbers = contents
    deferred, copies = np.zeros_like(index), 1
    sizes = layout.pipeline, layout.virtual, layout.microbatches
    flight = schedules.in_flight(options.schedule or "interleaved", index, *sizes)
    if options.schedule:
        deferred = schedules.deferred(options.schedule, index, layout.pipeline, layout.microbatches)
        copies = SCHEDULES[options.schedule].copies
    found = Stage(
        first=first,
        last=last,
        final_norm=final_norm,
        layers=layers,
        leading=leading,
        mtp=mtp,
        numbers=tuple(numbers),
        index=index,
        chunk=layers / layout.virtual,
        in_flight=flight,
        deferred=deferred,
        copies=np.full_like(index, float(copies)),
    )
    uneven = np.flatnonzero((layout.split > 0) & (layout.virtual > 1) & (found.layers > 0))
    if uneven.size:
        flight[uneven] = _of_uneven(model, layout[uneven], found[uneven])
    return found


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
    lengths = np.array([length for _, length in splits], dtype=np.int64)
    tables = np.zeros((len(splits), max((len(stages) for stages, _ in splits), default=1), 4))
    for table, (stages, _) in zip(tables, splits, strict=True):
        table[: len(stages)] = [(each.embedding, each.loss, each.layers, each.mtp) for each in stages]
    return splits_with(model, tables, lengths, before, exact=True)


def splits_with(
    model: Model, tables: FloatArray, lengths: IntArray, before: Splits | None = None, *, exact: bool = False
) -> Splits:
    """Return splits after those in `before`, each over as many devices as `lengths` say.

    `tables`: the embedding, the loss, the layers and the depths of multi-token prediction of each (virtual) stage in
    model order, of shape (splits, virtual stages, 4). With depths, the final norm is on the stage of the last layer,
    else on the stage with the loss.
    """
    kinds, chunks, row = layer_kinds(model), tables[:, :, 2], np.arange(len(tables))
    embedding, loss, layers, mtp = np.moveaxis(tables, 2, 0)
    norm = loss
    if model.mtp_num_layers:
        places = np.arange(tables.shape[1])
        norm = 1.0 * (places == np.where(chunks > 0, places, 0).max(axis=1, initial=0)[:, None])
    end = np.cumsum(chunks, axis=1)
    numbers = kinds.between(end - chunks, end)
    leading = sum(numbers[: kinds.leading], np.zeros_like(chunks))
    of_chunks = np.stack((embedding, loss, norm, layers, leading, mtp, *numbers), axis=2)
    contents = np.zeros((len(tables), int(lengths.max(initial=1)), of_chunks.shape[2]))
    for place in range(tables.shape[1]):
        contents[row, place % lengths] += of_chunks[:, place]
    return Splits.from_contents(contents, lengths.astype(np.float64), chunks, before, exact=exact)


def depths_received(model: Model, stage: Stage) -> FloatArray:
    """Return the number of multi-token prediction depths that the stage with the loss receives from another stage."""
    return stage.last * (model.mtp_num_layers - stage.mtp)


def layers_before_last(model: Model, layout: Layout) -> FloatArray:
    """Return the maximum number of layers on the last device, without the layers of its last virtual stage.

    These virtual stages have as many layers as in an even split.
    """
    return np.ceil(model.num_layers / (layout.pipeline * layout.virtual)) * (layout.virtual - 1.0)


def _of_uneven(model: Model, layout: Layout, stage: Stage) -> FloatArray:
    """Return the number of micro-batches in flight if virtual stages differ in their numbers of layers.

    The unit is a whole stage. A device runs `pipeline` micro-batches through its first virtual stage, then through the
    next one. The first virtual stages have one layer more. On the last device, each virtual stage but the last has the
    layers of an even split.
    """
    size, virtual, layers, flight = layout.pipeline, layout.virtual, stage.layers, stage.in_flight
    rounds = np.floor(flight / size)
    remaining = (flight - rounds * size) * virtual
    chunk_layers = np.floor(layers / virtual)
    layers_in_flight = remaining * chunk_layers + np.minimum(remaining, (layers - chunk_layers * virtual) * size)
    earlier_chunks = virtual - 1.0
    alone = (stage.mtp == 0) & (model.mtp_num_layers > 0)  # it has the loss; MTP is on an earlier stage
    last_chunk = np.where(alone, 0.0, np.clip(layers - layers_before_last(model, layout), 0.0, layers))
    current = np.minimum(remaining, earlier_chunks * size)
    on_last = current * (layers - last_chunk) / earlier_chunks + (remaining - current) * last_chunk
    held_layers = rounds * size * layers + np.where(stage.last > 0, on_last, layers_in_flight)
    return held_layers / layers


def _even(model: Model, layout: Layout, index: FloatArray, options: Options) -> list[FloatArray]:
    """Return the contents (`Splits`) of stage `index` of each candidate in an even split."""
    end, chunk = layout.pipeline - 1.0, _chunk_layers(model, layout, options)
    first, last = (index == 0).astype(np.float64), (index == end).astype(np.float64)
    middle = chunk * layout.virtual
    head = np.where(layout.first_layers > 0, layout.first_layers, middle - options.account_for_embedding)
    middle_layers = model.num_layers - head - middle * np.maximum(end - 1.0, 0.0)
    tail = np.where(layout.last_layers > 0, layout.last_layers, np.maximum(middle_layers, 0.0))
    layers = np.where(first > 0, head, np.where(last > 0, tail, middle))
    layers = np.where(end > 0, layers, float(model.num_layers))
    kinds = layer_kinds(model)
    numbers: Numbers = (layers,)
    if len(kinds.layers) > 1:
        before = np.where(index > 0, head + options.account_for_embedding + (index - 1.0) * middle, 0.0)
        width = layers + options.account_for_embedding * first + options.account_for_loss * last
        numbers = _numbers(model, options, before, width, layout.virtual)
    leading = np.minimum(sum(numbers[: kinds.leading], np.zeros_like(layers)), layers)
    if kinds.are_plain:
        numbers = kinds.mean(layers, leading)
    if options.schedule and SCHEDULES[options.schedule].folded:
        last = first
    if options.schedule == "dualpipe":
        first = last = np.maximum(first, last)
    norm = last
    if model.mtp_num_layers and options.account_for_loss:
        # the final norm follows the last layer, which may be before the stage of the loss
        norm = np.where((chunk == 1) & (end > 0), (index == end - 1.0).astype(np.float64), last)
    return [first, last, norm, layers, leading, last * model.mtp_num_layers, *numbers]


def _numbers(model: Model, options: Options, before: FloatArray, width: FloatArray, virtual: FloatArray) -> Numbers:
    """Return the number of layers of each kind on a stage of an even split that counts as `width` layers.

    `before`: those of all stages before it. Embedding and loss are included where they count as layers. Virtual stages
    of a device are assumed to have equal widths. If the schedule folds the pipeline, a device has the same number of
    the first and of the last layers. With several copies, it is the mean of its two stages, from both ends.
    """
    kinds, schedule = layer_kinds(model), SCHEDULES[options.schedule or "interleaved"]
    first, index = distinct([before, width, virtual])
    before, width, virtual = before[first], width[first], virtual[first]
    if schedule.parts == 2:
        size = width if schedule.copies > 1 else width / 2.0
        start = before * size / np.maximum(width, 1.0)
        ends = [kinds.between(each, each + size) for each in (start, model.num_layers - start - size)]
        return tuple((sum(pair) * width / np.maximum(2.0 * size, 1.0))[index] for pair in zip(*ends, strict=True))
    total = tuple(np.zeros_like(width) for _ in kinds.layers)
    for place in range(int(virtual.max(initial=1.0))):
        start = (before + place * _counted(model, options)) / virtual - options.account_for_embedding
        found = kinds.between(start, start + width / virtual)
        total = tuple(sum_ + np.where(place < virtual, each, 0.0) for sum_, each in zip(total, found, strict=True))
    return tuple(each[index] for each in total)


def _counted(model: Model, options: Options) -> int:
    """Return the number of layers of an even split, of which embedding and loss may count as one each."""
    return model.num_layers + options.account_for_embedding + options.account_for_loss


def _chunk_layers(model: Model, layout: Layout, options: Options) -> FloatArray:
    """Return the number of layers of one virtual stage in the middle of the pipeline."""
    fixed_first, fixed_last = layout.first_layers > 0, layout.last_layers > 0
    unset_stages = layout.pipeline - fixed_first - fixed_last
    spread = _counted(model, options) - layout.first_layers - layout.last_layers
    return np.ceil(spread / np.maximum(unset_stages * layout.virtual, 1.0))


def layer_input_bytes(train: Training, layout: Layout) -> FloatArray:
    """Return the bytes of the tensor between two layers: full recompute stores it, and pipeline stages send it."""
    width = train.model.residual_streams * train.model.hidden_size
    return train.value_bytes * width * layout.token_rows(train.sequence)
