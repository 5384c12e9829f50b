"""The fastest split of layers for which memory suffices, of candidates whose fastest one needs more than there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.balance import best_splits, leading_layers, splits_of, stage_layers
from flagcore.engines.megatron.memory.training import stages_in_use
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Training, distinct
from flagcore.engines.megatron.parallel.pipeline import Part, layers_before_last, stage_with
from flagcore.engines.megatron.time.pace import Pace
from flagcore.engines.megatron.time.step import Blocks

RELIEF = 1.125
"""A split that needs less memory is sought where the fastest one needs up to so many times what a device has. Further
ones fit seldom, and to seek them slows planning down."""


@dataclass(frozen=True, slots=True)
class _Found(ArrayRecord):
    """The best split of each candidate: the seconds of its slowest stage, inf where none fits, the layers of each stage
    and the leading dense ones among them, (candidates, stages).
    """

    seconds: FloatArray
    layers: FloatArray
    leading: FloatArray


def relieved(
    train: Training, layout: Layout, chosen: BoolArray, share: FloatArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout, BoolArray]:
    """Return the `chosen` candidates with splits for which memory suffices where they need more than a device has, and
    which these are. `share` is what they need of it. The slowest stage is the fastest that memory allows.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1) & (share > 1.0) & (share <= RELIEF))
    changed = np.zeros(chosen.shape, dtype=np.bool_)
    if not rows.size:
        return train, layout, changed
    few = replace(layout[rows], split=np.ones(rows.size))
    found = _best(train, few, costs, Pace.of(train, few, costs, blocks[rows]))
    fits = np.flatnonzero(np.isfinite(found.seconds))
    if fits.size:
        rows, few, found = rows[fits], few[fits], found[fits]
        first, which = distinct([few.pipeline, few.virtual, *found.layers.T, *found.leading.T])
        before = 1 if train.options.splits is None else len(train.options.splits.lengths)
        splits = splits_of(train, few[first], found.layers[first], found.leading[first])
        column = layout.split.copy()
        column[rows], changed[rows] = before + which, True
        train, layout = replace(train, options=replace(train.options, splits=splits)), replace(layout, split=column)
    return train, layout, changed


def _best(train: Training, layout: Layout, costs: Costs, pace: Pace) -> _Found:
    """Return the best splits for which memory suffices.

    With multi-token prediction the final norm is on the last stage but one if the very last virtual stage has no layer:
    these splits are searched apart.
    """

    def search(most: FloatArray, last: FloatArray | float = 0.0) -> _Found:
        best = best_splits(train, layout, pace, most, last)
        return _Found(best.seconds, *stage_layers(train, layout, best, most))

    most = _most(train, layout, costs)
    if not train.model.mtp_num_layers or train.options.equal_stages:
        return search(most)
    before, end = layers_before_last(train.model, layout), layout.pipeline - 1.0
    rows, leading, place = np.nonzero(_possible(train, layout) & (np.arange(most.shape[2]) >= end[:, None, None] - 1.0))
    limits, moved = _limits(train, layout[rows], costs, leading, place, end[rows] - 1.0), most.copy()
    moved[rows, leading, place] = np.where(place == end[rows], np.minimum(limits, before[rows]), limits)
    one, two = search(most, before + 1.0), search(moved)
    better = (two.seconds < one.seconds)[:, None]
    layers, dense = np.where(better, two.layers, one.layers), np.where(better, two.leading, one.leading)
    return _Found(np.minimum(one.seconds, two.seconds), layers, dense)


def _possible(train: Training, layout: Layout) -> BoolArray:
    """Return how many of the leading layers each stage may have: (candidates, leading ones, stages)."""
    first, place = leading_layers(train), np.arange(layout.pipeline.max())
    kinds = np.arange(first + 1)[:, None]
    found: BoolArray = np.where(kinds == 0, (place > 0) | (first == 0), kinds + place <= first)
    return found & (place < layout.pipeline[:, None, None])


def _most(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the most layers for which the memory of each stage suffices, by how many of them are leading dense ones:
    (candidates, leading ones, stages).

    Between the first stage and the last, stages without leading layers need less the later they are. Where the second
    one may have as many layers as the last but one, so may all.
    """
    possible, end = _possible(train, layout), layout.pipeline[:, None, None] - 1.0
    place, kinds = np.arange(possible.shape[2]), np.arange(possible.shape[1])[:, None]
    between, most = possible & (kinds == 0) & (place > 1) & (place < end - 1.0), np.zeros(possible.shape)
    rows, leading, stage = np.nonzero(possible & ~between)
    most[rows, leading, stage] = _limits(train, layout[rows], costs, leading, stage, end[rows, 0, 0])
    second, before = most[:, 0, 1], most[np.arange(len(most)), 0, np.maximum(end[:, 0, 0].astype(np.int64) - 1, 1)]
    np.copyto(most, second[:, None, None], where=between)
    rows, leading, stage = np.nonzero(between & (second < before)[:, None, None])
    most[rows, leading, stage] = _limits(train, layout[rows], costs, leading, stage, end[rows, 0, 0])
    return most


def _limits(
    train: Training, layout: Layout, costs: Costs, leading: IntArray, place: IntArray, norm: FloatArray
) -> FloatArray:
    """Return the most layers for which the memory of one stage of each candidate suffices, `leading - 1` or 0 for none.
    `norm` is the stage with the final norm.

    Memory grows with layers, nearly linearly.
    """
    total, index = train.model.num_layers, place.astype(np.float64)

    def room(rows: IntArray, layers: FloatArray) -> FloatArray:
        some, here, last = layout[rows], index[rows], 1.0 * (index[rows] == layout.pipeline[rows] - 1.0)
        dense = layers if train.model.num_moe_experts is None else leading[rows].astype(np.float64)
        part = Part(
            first=1.0 * (here == 0),
            last=last,
            final_norm=1.0 * (here == norm[rows]),
            layers=layers,
            dense=dense,
            mtp=last * train.model.mtp_num_layers,
        )
        (found,) = stages_in_use(train, some, costs, [stage_with(part, train.model, some, here, train.options)])
        return found.capacity - found.used

    least = np.maximum(leading, layout.virtual - (index == layout.pipeline - 1.0))
    fits, fails = np.maximum(least - 1.0, 0.0), np.full(index.size, total + 1.0)
    count, every = np.clip(np.ceil(total / layout.pipeline), fits + 1.0, total - 1.0), np.arange(index.size)
    one, two = np.split(room(np.concatenate((every, every)), np.concatenate((count, count + 1.0))), 2)
    layer = np.maximum(one - two, 1.0)
    mixed = np.where((leading > 0) & (layout.virtual > 1), np.inf, layer)  # one by one: fewer may need more
    count += np.floor(one / np.where(one < 0, mixed, layer))
    while every.size:
        count[every] = np.clip(count[every], fits[every] + 1.0, fails[every] - 1.0)
        left = room(every, count[every])
        fits[every] = np.where(left >= 0, count[every], fits[every])
        fails[every] = np.where(left >= 0, fails[every], count[every])
        count[every] += np.floor(left / np.where(left < 0, mixed[every], layer[every]))
        every = every[fits[every] + 1.0 < fails[every]]
    return fits
