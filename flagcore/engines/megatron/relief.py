"""Derives the fastest split of layers that fits memory, for candidates whose fastest split does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.balance import best_splits, leading_layers, splits_of, stage_layers
from flagcore.engines.megatron.memory.training import stages_in_use
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Training, distinct
from flagcore.engines.megatron.parallel.pipeline import Part, Stage, layers_before_last, stage_with
from flagcore.engines.megatron.time.pace import Pace
from flagcore.engines.megatron.time.step import Blocks


@dataclass(frozen=True, slots=True)
class _Found(ArrayRecord):
    """The best split of each candidate: the seconds of its slowest stage (inf if no split fits), and the layers of each
    stage and the leading dense layers among them, as (candidates, stages).
    """

    seconds: FloatArray
    layers: FloatArray
    leading: FloatArray


def fit_splits(
    train: Training, layout: Layout, chosen: BoolArray, share: FloatArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout, BoolArray]:
    """Return the `chosen` candidates, with new splits for those that do not fit, and the indices of the new splits. A
    new split fits and minimizes the time of the slowest stage. `share` is the memory in use relative to the capacity.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1) & (share > 1.0))
    if rows.size:
        rows = _candidates_with_room(train, layout, costs, rows)
    changed = np.zeros(chosen.shape, dtype=np.bool_)
    if not rows.size:
        return train, layout, changed
    subset = replace(layout[rows], split=np.ones(rows.size))
    found = _best_fitting(train, subset, costs, Pace.of(train, subset, costs, blocks[rows]))
    fits = np.flatnonzero(np.isfinite(found.seconds))
    if fits.size:
        rows, subset, found = rows[fits], subset[fits], found[fits]
        first, which = distinct([subset.pipeline, subset.virtual, *found.layers.T, *found.leading.T])
        before = 1 if train.options.splits is None else len(train.options.splits.lengths)
        splits = splits_of(train, subset[first], found.layers[first], found.leading[first])
        column = layout.split.copy()
        column[rows], changed[rows] = before + which, True
        train, layout = replace(train, options=replace(train.options, splits=splits)), replace(layout, split=column)
    return train, layout, changed


def _best_fitting(train: Training, layout: Layout, costs: Costs, pace: Pace) -> _Found:
    """Return the best splits that fit memory.

    With multi-token prediction, the final norm is on the last stage but one if the last virtual stage has no layer.
    These splits are searched separately.
    """

    def search(most: FloatArray, last: FloatArray | float = 0.0) -> _Found:
        best = best_splits(train, layout, pace, most, last)
        return _Found(best.seconds, *stage_layers(train, layout, best, most))

    most = _layer_limits(train, layout, costs)
    if not train.model.mtp_num_layers or train.options.equal_stages:
        return search(most)
    before, end = layers_before_last(train.model, layout), layout.pipeline - 1.0
    rows, leading, place = np.nonzero(_possible(train, layout) & (np.arange(most.shape[2]) >= end[:, None, None] - 1.0))
    limits, moved = _Room(train, layout[rows], costs, leading, place, end[rows] - 1.0).limits(), most.copy()
    moved[rows, leading, place] = np.where(place == end[rows], np.minimum(limits, before[rows]), limits)
    one, two = search(most, before + 1.0), search(moved)
    better = (two.seconds < one.seconds)[:, None]
    layers, dense = np.where(better, two.layers, one.layers), np.where(better, two.leading, one.leading)
    return _Found(np.minimum(one.seconds, two.seconds), layers, dense)


def _candidates_with_room(train: Training, layout: Layout, costs: Costs, rows: IntArray) -> IntArray:
    """Return the `rows` whose stages may have enough memory for all layers.

    Only the layers after the leading dense ones are checked: some stage has at least their mean number, and the last
    stage but one has the most free memory of all stages except the last. A dense layer may move up to `virtual - 1`
    other layers to virtual stages with fewer micro-batches in flight. Pipelines with virtual stages and leading layers
    on every device are always returned.
    """
    leading, subset = leading_layers(train), layout[rows]
    total, unknown = train.model.num_layers - leading, (subset.virtual > 1) & (subset.pipeline <= leading)
    mean, none = np.ceil(total / subset.pipeline), np.zeros(rows.size, dtype=np.int64)
    no_norm: FloatArray = np.full(rows.size, -1.0)
    even = replace(subset, split=np.zeros(rows.size))
    stages = [_stage(train, even, none, subset.pipeline - before, no_norm, mean) for before in (2.0, 1.0)]
    fits = [found.used <= found.capacity for found in stages_in_use(train, even, costs, stages)]
    kept = np.flatnonzero(fits[0] | fits[1] | unknown)
    rows, subset, none, unknown = rows[kept], replace(subset[kept], split=np.ones(kept.size)), none[kept], unknown[kept]
    end = subset.pipeline.astype(np.int64) - 1
    before, behind = (_Room(train, subset, costs, none, place, no_norm[kept]).limits() for place in (end - 1, end))
    return rows[(before * end + behind + (subset.virtual - 1.0) * leading >= total) | unknown]


def _possible(train: Training, layout: Layout) -> BoolArray:
    """Return which numbers of leading layers each stage may have, as (candidates, leading layers, stages)."""
    first, place = leading_layers(train), np.arange(layout.pipeline.max())
    kinds = np.arange(first + 1)[:, None]
    found: BoolArray = np.where(kinds == 0, (place > 0) | (first == 0), kinds + place <= first)
    return found & (place < layout.pipeline[:, None, None])


def _layer_limits(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the maximum number of layers that fits each stage, by the leading dense layers among them, as (candidates,
    leading layers, stages).

    Between the first and the last stage, later stages without leading layers need less memory. If the second stage may
    have as many layers as the last but one, so may all stages between them.
    """
    possible, end = _possible(train, layout), layout.pipeline[:, None, None] - 1.0
    place, kinds = np.arange(possible.shape[2]), np.arange(possible.shape[1])[:, None]
    between, most = possible & (kinds == 0) & (place > 1) & (place < end - 1.0), np.zeros(possible.shape)
    rows, leading, stage = np.nonzero(possible & ~between)
    most[rows, leading, stage] = _Room(train, layout[rows], costs, leading, stage, end[rows, 0, 0]).limits()
    second, before = most[:, 0, 1], most[np.arange(len(most)), 0, np.maximum(end[:, 0, 0].astype(np.int64) - 1, 1)]
    np.copyto(most, second[:, None, None], where=between)
    rows, leading, stage = np.nonzero(between & (second < before)[:, None, None])
    room = _Room(train, layout[rows], costs, leading, stage, end[rows, 0, 0])
    most[rows, leading, stage] = room.largest(second[rows], before[rows] + 1.0)
    return most


@dataclass(frozen=True, slots=True)
class _Room:
    """The free bytes of stage `place` of each candidate, whose first `leading` layers are dense. `norm` is the stage
    with the final norm.
    """

    train: Training
    layout: Layout
    costs: Costs
    leading: IntArray
    place: IntArray
    norm: FloatArray

    def bytes(self, rows: IntArray, *layers: FloatArray) -> list[FloatArray]:
        """Return the free bytes of the stages of some rows for each number of layers; negative if the layers do not
        fit.
        """
        layout, place = self.layout[rows], self.place[rows].astype(np.float64)
        stages = [_stage(self.train, layout, self.leading[rows], place, self.norm[rows], each) for each in layers]
        return [found.capacity - found.used for found in stages_in_use(self.train, layout, self.costs, stages)]

    def limits(self) -> FloatArray:
        """Return the maximum number of layers that fits; if the minimum of a stage does not fit, a smaller number."""
        total, every = self.train.model.num_layers, np.arange(self.place.size)
        last = self.place == self.layout.pipeline - 1.0
        fits = np.maximum(np.maximum(self.leading, self.layout.virtual - last) - 1.0, 0.0)
        mean = np.clip(np.ceil(total / self.layout.pipeline), fits + 1.0, total - 1.0)
        one, two = self.bytes(every, mean, mean + 1.0)
        fits = np.where(two >= 0, mean + 1.0, np.where(one >= 0, mean, fits))
        fails = np.where(one < 0, mean, np.where(two < 0, mean + 1.0, total + 1.0))
        layer = np.maximum(one - two, 1.0)
        return self.largest(fits, fails, mean + np.floor(one / layer), layer)

    def largest(
        self, fits: FloatArray, fails: FloatArray, guess: FloatArray | None = None, layer: FloatArray | float = np.inf
    ) -> FloatArray:
        """Return the maximum number of layers that fits, between `low`, which fits, and `high`, which does not. More
        layers never need less memory; `layer` is the approximate need of one layer.
        """
        fits, fails, steps = fits.copy(), fails.copy(), np.broadcast_to(layer, fits.shape)
        count = np.floor((fits + fails) / 2.0) if guess is None else guess
        unsettled = np.flatnonzero(fits + 1.0 < fails)
        while unsettled.size:
            low, high = fits[unsettled], fails[unsettled]
            here = np.clip(count[unsettled], low + 1.0, high - 1.0)
            (left,) = self.bytes(unsettled, here)
            low, high = np.where(left >= 0, here, low), np.where(left >= 0, high, here)
            fits[unsettled], fails[unsettled] = low, high
            count[unsettled] = (
                np.floor((low + high) / 2.0) if guess is None else here + np.floor(left / steps[unsettled])
            )
            unsettled = unsettled[low + 1.0 < high]
        return fits


def _stage(
    train: Training, layout: Layout, leading: IntArray, place: FloatArray, norm: FloatArray, layers: FloatArray
) -> Stage:
    """Return stage `place` of each candidate with these layers, of which the first `leading` are dense. `norm` is the
    stage with the final norm.
    """
    last = 1.0 * (place == layout.pipeline - 1.0)
    part = Part(
        first=1.0 * (place == 0),
        last=last,
        final_norm=1.0 * (place == norm),
        layers=layers,
        dense=layers if train.model.num_moe_experts is None else leading.astype(np.float64),
        mtp=last * train.model.mtp_num_layers,
    )
    return stage_with(part, train.model, layout, place, train.options)
