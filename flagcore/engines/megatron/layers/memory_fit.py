"""Derives the fastest split of layers that fits memory, for candidates whose fastest split does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.layers.fastest import fill_sooner, with_splits
from flagcore.engines.megatron.layers.partition import LayerSplit, Paces, best_splits, leading_layers
from flagcore.engines.training.layout import Layout, Placement, Training
from flagcore.engines.training.memory.training import stages_in_use, states_of
from flagcore.engines.training.parameters import layer_parameters
from flagcore.engines.training.stages import layers_before_last, stage_of
from flagcore.engines.training.time.pipeline import shape_seconds
from flagcore.engines.training.time.step import Blocks


def fit_splits(
    train: Training, layout: Layout, chosen: BoolArray, share: FloatArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout, BoolArray]:
    """Return the `chosen` candidates, with new splits for those that do not fit, and the indices of the new splits. A
    new split fits and minimizes the time of the slowest stage. `share` is the memory in use relative to the capacity.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1) & (share > 1.0))
    changed = np.zeros(chosen.shape, dtype=np.bool_)
    if rows.size:
        rows = rows[_may_fit(train, layout[rows], costs)]
    if not rows.size:
        return train, layout, changed
    subset = replace(layout[rows], split=np.ones(rows.size))
    found = _best_fitting(train, subset, costs, Paces.from_blocks(train, subset, costs, blocks[rows]))
    fits = np.flatnonzero(np.isfinite(found.seconds))
    if fits.size:
        rows, subset, found = rows[fits], subset[fits], found[fits]
        train, number = with_splits(train, subset, found)
        column = layout.split.copy()
        column[rows], changed[rows] = number, True
        layout = replace(layout, split=column)
    return train, layout, changed


def _may_fit(train: Training, layout: Layout, costs: Costs) -> BoolArray:
    """Return which candidates may have room for all layers: if the stages of a node group had the room of the last one,
    which stores the fewest micro-batches. The last stage of all counts apart, with as little as it may have.

    A dense layer may move up to `virtual - 1` other layers to virtual stages with fewer micro-batches in flight.
    Pipelines with virtual stages and leading layers on every device always may.
    """
    leading, has_experts = leading_layers(train), train.model.num_moe_experts is not None
    total, last = train.model.num_layers - leading, layout.pipeline - 1.0
    layout, placement = replace(layout, split=np.ones_like(layout.split)), Placement.from_layout(layout, costs)
    counts, weights_room = placement.stages(layout), np.zeros(())
    for mesh, group, count in zip(placement.layouts, costs.groups, counts, strict=True):
        states = states_of(train, mesh, layer_parameters(train, mesh, moe=has_experts))
        per_layer = sum(each.total for each in states)
        weights_room = weights_room + count * np.floor((group.memory.capacity_bytes() or np.inf) / per_layer)
    unknown = (layout.virtual > 1) & (layout.pipeline <= leading)
    may_fit: BoolArray = (weights_room >= total) | (layout.pipeline <= leading)
    rows = np.flatnonzero(may_fit & ~unknown)
    nowhere = np.full_like(last, -1.0)
    norm, mtp = nowhere if train.model.mtp_num_layers else last, nowhere if train.options.early_mtp else last
    room = (layout.virtual[rows] - 1.0) * leading
    ends = [*(start - 1.0 for start in placement.starts), np.maximum(last - 1.0, 0.0), last]
    for place, count in zip(ends, [*counts[:-1], counts[-1] - 1.0, np.ones_like(last)], strict=True):
        stage = place[rows].astype(np.int64)
        at = _Room(train, layout[rows], costs, np.zeros_like(stage), stage, norm[rows], mtp[rows])
        room = room + count[rows] * at.limits()
    may_fit[rows] = room >= total
    return may_fit


def _best_fitting(train: Training, layout: Layout, costs: Costs, paces: Paces) -> LayerSplit:
    """Return the best splits for which memory suffices.

    If the last virtual stage of the stage with multi-token prediction has no layer, the final norm is on the stage
    before it. These splits are searched separately, and their memory is computed only for candidates that they would
    make faster if memory sufficed.
    """
    most, depths = _layer_limits(train, layout, costs), train.model.mtp_num_layers
    if not depths:  # the final norm is always on the last stage
        found = best_splits(train, layout, paces, most)
    else:
        found = _splits_with_mtp(train, layout, costs, paces, most)
    # Memory is computed last, because it takes most of the time: `bound` is the split's time without limits on the
    # stages that change, and few candidates would gain by it.
    may_be_early = train.options.early_mtp and not costs.further
    for early, is_empty in list(product((False, True)[: 1 + may_be_early], (False, True)))[1:] if depths else ():
        bound = _splits_with_mtp(train, layout, None, paces, most, early=early, is_empty=is_empty)
        extra = early * shape_seconds(train, layout, costs)
        rows = np.flatnonzero(bound.seconds + extra < found.seconds)
        if not rows.size:
            continue
        subset, longest = layout[rows], int(layout.pipeline[rows].max())
        limits = most[rows, :, :longest]
        other = _splits_with_mtp(train, subset, costs, paces[rows], limits, early=early, is_empty=is_empty)
        seconds = other.seconds + extra[rows]
        faster = np.flatnonzero(seconds < found.seconds[rows])
        rows = rows[faster]
        found.seconds[rows], found.early[rows] = seconds[faster], other.early[faster]
        found.layers[rows, :longest], found.leading[rows, :longest] = other.layers[faster], other.leading[faster]
    fill_sooner(train, layout, paces, found, most)
    return found


def _splits_with_mtp(
    train: Training,
    layout: Layout,
    costs: Costs | None,
    paces: Paces,
    most: FloatArray,
    *,
    early: bool = False,
    is_empty: bool = False,
) -> LayerSplit:
    """Return the best splits with multi-token prediction on the last stage or, with `early`, on the one before.

    With `is_empty`, the last virtual stage of that stage has no layer. Without `costs`, the stages that change have no
    limits.
    """
    mtp, empty = layout.pipeline - 1.0 - early, _layers_beside_empty_stage(train, layout, early=early)
    at_least: FloatArray | float = empty[:, 0] + 1.0
    if early or is_empty:
        most = _limits_with_mtp(train, layout, costs, most, (mtp - is_empty) % layout.pipeline, mtp)
    if is_empty:
        index, place, at_least = np.arange(mtp.size), mtp.astype(np.int64), 0.0
        most[index, :, place] = np.minimum(most[index, :, place], empty)
    return best_splits(train, layout, paces, most, at_least, early=early)


def _layers_beside_empty_stage(train: Training, layout: Layout, *, early: bool) -> FloatArray:
    """Return the maximum number of layers of the stage with multi-token prediction if its last virtual stage has none,
    for each number of leading dense layers among them: (candidates, leading layers).
    """
    kinds, virtual = np.arange(leading_layers(train) + 1.0), layout.virtual[:, None]
    if not early:
        return layers_before_last(train.model, layout)[:, None] + 0.0 * kinds
    return np.where(virtual > 1, virtual - 1.0 + np.maximum(kinds - 1.0, 0.0), 0.0)


def _limits_with_mtp(
    train: Training, layout: Layout, costs: Costs | None, most: FloatArray, norm: FloatArray, mtp: FloatArray
) -> FloatArray:
    """Return `most` with the limits of the stages that `norm` and multi-token prediction change; without
    `costs`, these stages have no limits.
    """
    place = np.arange(most.shape[2])
    changed = (place >= np.minimum(mtp, layout.pipeline - 2.0)[:, None]) | (place == norm[:, None])
    if costs is None:
        return np.where(changed[:, None], float(train.model.num_layers), most)
    wanted = _possible(train, layout) & changed[:, None]
    return np.where(wanted, _limits(train, layout, costs, wanted, norm, mtp), most)


def _limits(
    train: Training,
    layout: Layout,
    costs: Costs,
    wanted: BoolArray,
    norm: FloatArray | None = None,
    mtp: FloatArray | None = None,
) -> FloatArray:
    """Return the maximum numbers of layers where `wanted`, else 0: (candidates, leading layers, stages). The final norm
    and multi-token prediction are on the stages `norm` and `mtp`, by default on the last one.
    """
    last, most = layout.pipeline - 1.0, np.zeros(wanted.shape)
    rows, leading, stage = np.nonzero(wanted)
    at = [(last if each is None else each)[rows] for each in (norm, mtp)]
    most[rows, leading, stage] = _Room(train, layout[rows], costs, leading, stage, *at).limits()
    return most


def _possible(train: Training, layout: Layout) -> BoolArray:
    """Return which numbers of leading layers each stage may have, as (candidates, leading layers, stages)."""
    first, place = leading_layers(train), np.arange(layout.pipeline.max())
    kinds = np.arange(first + 1)[:, None]
    found: BoolArray = np.where(kinds == 0, (place > 0) | (first == 0), kinds + place <= first)
    return found & (place < layout.pipeline[:, None, None])


def _layer_limits(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the maximum number of layers that fits the memory of each stage, for each number of leading dense layers
    among them: (candidates, leading layers, stages).

    Between the first and the last stage of equal chips, later stages without leading layers need less memory. If the
    second stage may have as many layers as the second-to-last, so may all stages between them.
    """
    possible, last = _possible(train, layout), layout.pipeline - 1.0
    place, kinds = np.arange(possible.shape[2]), np.arange(possible.shape[1])[:, None]
    between = possible & (kinds == 0) & (place > 1) & (place < last[:, None, None] - 1.0) & (not costs.further)
    most = _limits(train, layout, costs, possible & ~between)
    second, before = most[:, 0, 1], most[np.arange(last.size), 0, np.maximum(last.astype(np.int64) - 1, 1)]
    np.copyto(most, second[:, None, None], where=between)
    reach = np.where(between, before[:, None, None], most).max(axis=1).sum(axis=1)
    wanted = (second < before) & ((reach >= train.model.num_layers) | (train.model.mtp_num_layers > 0))
    rows, leading, stage = np.nonzero(between & wanted[:, None, None])
    room = _Room(train, layout[rows], costs, leading, stage, last[rows], last[rows])
    share = (stage - 1.0) / (last[rows] - 2.0)
    guess = np.floor(1.0 / ((1.0 - share) / np.maximum(second[rows], 0.5) + share / before[rows]))
    most[rows, leading, stage] = room.largest(second[rows], before[rows] + 1.0, guess)
    return most


@dataclass(frozen=True, slots=True)
class _Room:
    """The free bytes of one stage of each candidate: stage `place`, with `leading` dense layers before its others.
    `norm` is the stage with the final norm, `mtp` the one with multi-token prediction.
    """

    train: Training
    layout: Layout
    costs: Costs
    leading: IntArray
    place: IntArray
    norm: FloatArray
    mtp: FloatArray

    def bytes(self, rows: IntArray, *layers: FloatArray) -> list[FloatArray]:
        """Return the free bytes of the stages of some rows for each number of layers; negative if the layers do not
        fit, very many if the capacity is unknown.
        """
        layout, place = self.layout[rows], self.place[rows].astype(np.float64)
        norm, mtp = self.norm[rows], self.mtp[rows]
        stages = [stage_of(self.train, layout, place, each, self.leading[rows], norm, mtp) for each in layers]
        found = stages_in_use(self.train, layout, self.costs, stages)
        return [np.nan_to_num(each.capacity, nan=1e30) - each.used for each in found]

    def limits(self) -> FloatArray:
        """Return the maximum number of layers that fits; if the minimum of a stage does not fit, a smaller number."""
        total, index = self.train.model.num_layers, np.arange(self.place.size)
        may_end_empty = (self.place == self.layout.pipeline - 1.0) | (self.place == self.mtp)
        fits = np.maximum(self.leading, self.layout.virtual - may_end_empty) - 1.0
        mean = np.clip(np.ceil(total / self.layout.pipeline), fits + 1.0, total - 1.0)
        free, free_with_more = self.bytes(index, mean, mean + 1.0)
        fits = np.where(free_with_more >= 0, mean + 1.0, np.where(free >= 0, mean, fits))
        fails = np.where(free < 0, mean, np.where(free_with_more < 0, mean + 1.0, total + 1.0))
        layer = np.maximum(free - free_with_more, 1.0)
        return self.largest(fits, fails, mean + np.floor(free / layer), layer)

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
