"""The split of layers over pipeline stages that makes the slowest stage of a candidate fastest, and that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.memory.training import memory_in_use, stages_in_use
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Splits, Training, distinct
from flagcore.engines.megatron.parallel.pipeline import DENSE, LAYERS, Stage, in_flight, stage
from flagcore.engines.megatron.partition import EQUAL, Fronts, Middles, search, search_equal
from flagcore.engines.megatron.stages import chunk_layers, layout_text
from flagcore.engines.megatron.time.pace import DEPENDS_ON, Pace
from flagcore.engines.megatron.time.step import Blocks

RELIEF = 1.125
"""A split that needs less memory is sought where the fastest one needs up to so many times what a device has. Beyond
that so many layers would have to move that recomputing them costs less."""


@dataclass(frozen=True, slots=True)
class _Found(ArrayRecord):
    """The best split of each candidate: how the leading dense layers lie (a number of `Fronts.all`), the layers of each
    stage and how many of them are leading ones, (candidates, stages), and the seconds of the slowest stage, inf if
    there is no split.
    """

    choice: IntArray
    ends: FloatArray
    seconds: FloatArray


def split_layers(
    train: Training, layout: Layout, chosen: BoolArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout]:
    """Return the `chosen` candidates with the splits in which their slowest stages are fastest, whatever they need.

    Those for which the even split is as fast keep it. `costs` are those in a run, `blocks` those of all candidates.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1))
    if not rows.size:
        return train, layout
    first, which = layout[rows].distinct(DEPENDS_ON)
    few = layout[rows[first]]
    found = _best(train, few, Pace.of(train, few, costs, blocks[rows[first]]))
    alike, split = distinct([found.choice.astype(np.float64), few.pipeline, few.virtual, *found.ends.T])
    layers, leading = _stages(train, few[alike], found[alike])
    even = (found.seconds == np.inf) | _even(train, few, found)
    number, splits = np.where(even, 0.0, 1.0 + split), _splits(train, few[alike], layers, leading)
    column = np.zeros_like(layout.pipeline)
    column[rows] = number[which]
    return replace(train, options=replace(train.options, splits=splits)), replace(layout, split=column)


def relieved(
    train: Training, layout: Layout, chosen: BoolArray, share: FloatArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout, BoolArray]:
    """Return the `chosen` candidates with splits for which memory suffices where they need more than a device has, and
    which these are. `share` is what they need of it. The slowest stage is the fastest that memory allows.
    """
    changed = np.zeros(chosen.shape, dtype=np.bool_)
    rows = np.flatnonzero(chosen & (layout.pipeline > 1) & (share > 1.0) & (share <= RELIEF))
    for _ in range(2):  # memory is not quite linear in layers
        if not rows.size:
            break
        few = layout[rows]
        most = _most(train, few, costs)
        found = _best(train, few, Pace.of(train, few, costs, blocks[rows]), most)
        fits = np.flatnonzero(np.isfinite(found.seconds))
        rows, few, most = rows[fits], few[fits], most[fits]
        if not rows.size:
            break
        layers, leading = _stages(train, few, found[fits], most)
        first, which = distinct([few.pipeline, few.virtual, *layers.T, *leading.T])
        before = 1 if train.options.splits is None else len(train.options.splits.lengths)
        splits = _splits(train, few[first], layers[first], leading[first])
        column = layout.split.copy()
        column[rows] = before + which
        train, layout = replace(train, options=replace(train.options, splits=splits)), replace(layout, split=column)
        changed[rows] = True
        memory = memory_in_use(train, layout[rows], costs)
        rows = rows[memory.used > memory.capacity]
    return train, layout, changed


def layouts(train: Training, layout: Layout) -> list[str]:
    """Return the layouts of candidates in Megatron's grammar, empty for those without a split of their own."""
    found, splits = [], train.options.splits
    for row, number in enumerate(layout.split.astype(np.int64).tolist()):
        if splits is None or not number:
            found.append("")
            continue
        held = splits.holdings[number, : int(layout.pipeline[row])].astype(np.int64)
        layers, dense = held[:, LAYERS].tolist(), held[:, DENSE].tolist()
        leading = [0] * len(layers) if train.model.num_moe_experts is None else dense
        chunks = chunk_layers(layers, leading, int(layout.virtual[row]))
        found.append(layout_text(chunks, train.model.mtp_num_layers))
    return found


def ends(layout: Layout, splits: Splits | None) -> list[tuple[int, int]]:
    """Return the layers of the first and of the last stage of candidates, zeros for those without a split of their
    own.
    """
    number = layout.split.astype(np.int64)
    if splits is None:
        return [(0, 0)] * number.size
    last = layout.pipeline.astype(np.int64) - 1
    pairs = zip(splits.holdings[number, 0, LAYERS], splits.holdings[number, last, LAYERS], strict=True)
    return [(int(first), int(end)) if own else (0, 0) for (first, end), own in zip(pairs, number, strict=True)]


def _most(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the most layers for which the memory of each stage suffices, (candidates, stages).

    Memory is linear in layers, and between the second stage and the last but one in micro-batches in flight.
    """
    end = layout.pipeline - 1.0
    places = [np.zeros_like(end), np.minimum(end, 1.0), np.maximum(end - 1.0, 0.0), end]
    here = [stage(train.model, layout, place, train.options) for place in places]
    other = [_one_layer_off(train, layout, each) for each in here]
    memory = stages_in_use(train, layout, costs, [*here, *other])
    slopes, bases = [], []
    for number, (one, two) in enumerate(zip(here, other, strict=True)):
        used = memory[number].used
        slopes.append(np.maximum((used - memory[number + len(here)].used) / (one.layers - two.layers), 1.0))
        bases.append(memory[number].capacity - used + slopes[-1] * one.layers)
    longest, flight = int(layout.pipeline.max()), [in_flight(layout, place, train.options) for place in places]
    most = np.zeros((end.size, longest))
    for place in range(longest):
        index = np.minimum(end, float(place))
        way = in_flight(layout, index, train.options) - flight[1]
        way = way / np.where(flight[2] == flight[1], 1.0, flight[2] - flight[1])
        between = (bases[1] + way * (bases[2] - bases[1])) / (slopes[1] + way * (slopes[2] - slopes[1]))
        room = np.where(index == 0, bases[0] / slopes[0], np.where(index == end, bases[3] / slopes[3], between))
        most[:, place] = np.maximum(np.floor(room + 1e-6), 0.0)
    return most


def _one_layer_off(train: Training, layout: Layout, held: Stage) -> Stage:
    """Return a stage with a layer less, or one more where it has none to give."""
    off = np.where(held.layers > 1, -1.0, 1.0)
    dense = held.dense + (off if train.model.num_moe_experts is None else 0.0)
    return replace(held, layers=held.layers + off, dense=dense, chunk=(held.layers + off) / layout.virtual)


def _best(train: Training, layout: Layout, pace: Pace, most: FloatArray | None = None) -> _Found:
    """Return the best split of each candidate, with at most so many layers on each stage, (candidates, stages)."""
    total, leading = train.model.num_layers, _leading(train)
    if train.options.equal_stages:
        return _best_equal(train, layout, pace, most)
    several = list(Fronts.all(leading))
    found, possible = _none(train, layout.pipeline.size), np.ones(layout.pipeline.size, dtype=np.bool_)
    if most is not None:
        later = np.arange(most.shape[1]) >= layout.pipeline[:, None] - 1.0
        possible &= np.all(later | (most >= layout.virtual[:, None]), axis=1)
    for number, fronts in enumerate(several):
        rows = np.flatnonzero(possible & fronts.fit(layout.pipeline) & ~np.isnan(found.seconds))
        if number:  # a first stage with other layers than leading ones has all of them, unless there are virtual stages
            rows = rows[(layout.virtual[rows] > 1) | (found.choice[rows] > 0) | (found.ends[rows, 0] <= leading)]
        if not rows.size:
            continue
        count, places = layout.pipeline[rows] - 1.0 - len(fronts.dense), range(len(fronts.dense))
        limits = middle = None
        if most is not None:
            last = layout.pipeline[rows].astype(np.int64) - 1
            limits, middle = [*(most[rows, each] for each in places), most[rows, last]], most[rows, len(fronts.dense) :]
        best = search(pace[rows], layout.virtual[rows], total, fronts, Middles.of(count, middle), limits)
        better = ~(best.seconds * EQUAL >= found.seconds[rows])  # also where a time is not known
        rows = rows[better]
        found.choice[rows], found.seconds[rows], found.ends[rows] = number, best.seconds[better], 0.0
        found.ends[rows[:, None], [*places, -1]] = best.layers[:, better].T
    return found


def _best_equal(train: Training, layout: Layout, pace: Pace, most: FloatArray | None) -> _Found:
    """Return the same for releases without layouts: stages between the first and the last are equal."""
    count, last = layout.pipeline - 2.0, layout.pipeline.astype(np.int64) - 1
    limits = np.full((last.size, int(layout.pipeline.max())), np.inf) if most is None else most
    place = np.arange(limits.shape[1])
    between = np.where((place > 0) & (place < last[:, None]), limits, np.inf).min(axis=1)
    three = limits[:, 0], between, limits[np.arange(last.size), last]
    best = search_equal(pace, layout.virtual, train.model.num_layers, _leading(train), count, three)
    found = _none(train, last.size)
    found.ends[:, [0, -1]] = best.layers.T
    return replace(found, seconds=best.seconds)


def _none(train: Training, size: int) -> _Found:
    """Return that there is no split for so many candidates."""
    widest = max(len(each.dense) for each in Fronts.all(_leading(train))) + 1
    return _Found(np.zeros(size, dtype=np.int64), np.zeros((size, widest)), np.full(size, np.inf))


def _leading(train: Training) -> int:
    model = train.model
    return 0 if model.num_moe_experts is None else min(model.moe_first_dense_layers, model.num_layers)


def _even(train: Training, layout: Layout, found: _Found) -> BoolArray:
    """Return which splits are the even one."""
    each = train.model.num_layers / layout.pipeline
    even: BoolArray = each % layout.virtual == 0
    for number, fronts in enumerate(Fronts.all(_leading(train))):
        places = [*range(len(fronts.dense)), -1]
        alike = (found.ends[:, places] == each[:, None]).all(axis=1)
        even &= (found.choice != number) | (alike & fronts.even(each / layout.virtual))
    return even


def _stages(
    train: Training, layout: Layout, found: _Found, most: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return the layers of each stage of each split, and the leading dense ones among them, (splits, stages).

    Stages between the first and the last have one number of layers, or as many as `most` allows, and the first of them
    one less: they hold most micro-batches.
    """
    longest, total = int(layout.pipeline.max()), train.model.num_layers
    layers, leading = np.zeros((2, layout.pipeline.size, longest))
    place, last = np.arange(longest), layout.pipeline.astype(np.int64) - 1
    for number, fronts in enumerate(Fronts.all(_leading(train))):
        rows = np.flatnonzero(found.choice == number)
        if not rows.size:
            continue
        ends, count = found.ends[rows], len(fronts.dense)
        layers[rows, :count], leading[rows, :count] = ends[:, :count], fronts.dense
        layers[rows, last[rows]], leading[rows, last[rows]] = ends[:, -1], fronts.last
        limits = np.full((rows.size, longest), np.inf) if most is None else most[rows, :longest]
        middle = (place >= count) & (place < last[rows, None])
        rest = total - ends.sum(axis=1)
        middles = Middles.of(middle.sum(axis=1).astype(np.float64), None if most is None else limits[:, count:])
        level = middles.level(rest)[:, None]
        held = np.where(middle, np.minimum(limits, level), 0.0)
        full = middle & (limits >= level)
        surplus = held.sum(axis=1) - rest
        held -= full & (np.cumsum(full, axis=1) <= surplus[:, None])
        layers[rows] += held
    return layers, leading


def _splits(train: Training, layout: Layout, layers: FloatArray, leading: FloatArray) -> Splits:
    """Return the splits with these layers on their stages. The final norm follows the last layer, or is at the loss."""
    model, place = train.model, np.arange(layers.shape[1])
    end = layout.pipeline[:, None] - 1.0
    first, last = (place == 0) & (end >= 0), place == end
    norm = last
    if model.mtp_num_layers and not train.options.equal_stages:
        without = _last_chunk(layers, layout) == 0
        norm = place == end - without[:, None]
    dense = layers if model.num_moe_experts is None else leading
    table = np.stack((first, last, norm, layers, dense, last * float(model.mtp_num_layers)), axis=2).astype(np.float64)
    return Splits.of(table, layout.pipeline, train.options.splits)


def _last_chunk(layers: FloatArray, layout: Layout) -> FloatArray:
    """Return the layers of the last virtual stage: what the others of its device leave, as large as the largest."""
    last = np.take_along_axis(layers, layout.pipeline.astype(np.int64)[:, None] - 1, axis=1)[:, 0]
    largest = np.ceil(layers.max(axis=1) / layout.virtual)
    left: FloatArray = np.maximum(last - largest * (layout.virtual - 1.0), 0.0)
    return left
