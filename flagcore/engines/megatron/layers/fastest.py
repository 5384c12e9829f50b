"""Derives the split of layers over pipeline stages that minimizes the time of the slowest stage and fits memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.layers.mixed_split import best_mixed_splits, few_microbatches
from flagcore.engines.megatron.layers.partition import (
    EQUAL,
    LayerSplit,
    Middles,
    all_fronts,
    leading_layers,
    search,
    search_equal,
)
from flagcore.engines.megatron.layers.stages import chunk_layers, layout_text
from flagcore.engines.training.layout import ArrayRecord, Layout, Placement, Splits, Training, distinct
from flagcore.engines.training.stages import DENSE, LAYERS, MTP, stage
from flagcore.engines.training.time.pace import DEPENDS_ON, Pace
from flagcore.engines.training.time.pipeline import shape_seconds
from flagcore.engines.training.time.step import Blocks


@dataclass(frozen=True, slots=True)
class _Found(ArrayRecord):
    """The best split of each candidate.

    `choice` is the index of its placement in `all_fronts`. `ends` are the layers of its first stages and of its last
    one: (candidates, stages). `seconds` is the time of the slowest stage, inf if there is no split.
    """

    choice: IntArray
    ends: FloatArray
    seconds: FloatArray


def split_layers(
    train: Training, layout: Layout, chosen: BoolArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout]:
    """Return the `chosen` candidates with the splits that minimize the time of their slowest stages, regardless of
    memory.

    Candidates for which the even split is as fast keep it. `costs` are the costs in a run, `blocks` the blocks of all
    candidates.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1))
    if not rows.size:
        return train, layout
    layouts, starts = [layout[rows]], Placement.from_layout(layout[rows], costs).starts
    layouts += [each.layout for each in layouts[0].further]
    batches = [layouts[0].microbatches * few_microbatches(train, layouts[0])] if costs.further else []
    depends = (getattr(each, name) for each in layouts for name in DEPENDS_ON)
    first, which = distinct([*depends, *starts, *batches])
    unique = layout[rows[first]]
    column = np.zeros_like(layout.pipeline)
    if costs.further:
        mixed = best_mixed_splits(train, unique, costs, blocks[rows[first]])
        train, number = with_splits(train, unique, mixed)
        column[rows] = np.where(np.isfinite(mixed.seconds), number, 0.0)[which]
        return train, replace(layout, split=column)
    pace = Pace.from_blocks(train, unique, costs, blocks[rows[first]])
    found = best_splits(train, unique, pace)
    if train.options.early_mtp:
        early = best_splits(train, unique, pace, early=True)
        found = found.or_else(early, early.seconds * EQUAL + shape_seconds(train, unique, costs) < found.seconds)
    alike, split = distinct([found.choice.astype(np.float64), unique.pipeline, unique.virtual, *found.ends.T])
    even = (found.seconds == np.inf) | _even(train, unique, found)
    splits = splits_of(train, unique[alike], stage_layers(train, unique[alike], found[alike]))
    number = np.where(even, 0.0, 1.0 + split)
    column[rows] = number[which]
    return replace(train, options=replace(train.options, splits=splits)), replace(layout, split=column)


def layouts(train: Training, layout: Layout) -> list[str]:
    """Return the layouts of candidates in Megatron's grammar; empty for candidates without a derived split."""
    found, splits = [], train.options.splits
    for row, number in enumerate(layout.split.astype(np.int64).tolist()):
        if splits is None or not number:
            found.append("")
            continue
        held = splits.holdings[number]
        leading = held[:, DENSE] * (train.model.num_moe_experts is not None)
        length, depths = int(layout.pipeline[row]), train.model.mtp_num_layers
        early = bool(depths and not held[length - 1, MTP])
        chunks = _chunks(held[:, LAYERS], leading, length, int(layout.virtual[row]), early=early)
        found.append(layout_text(chunks, depths, early=early))
    return found


def ends(layout: Layout, splits: Splits | None) -> list[tuple[int, int]]:
    """Return the layers of the first and of the last stage of candidates; 0 for candidates without a derived split."""
    number = layout.split.astype(np.int64)
    if splits is None:
        return [(0, 0)] * number.size
    last = layout.pipeline.astype(np.int64) - 1
    pairs = zip(splits.holdings[number, 0, LAYERS], splits.holdings[number, last, LAYERS], strict=True)
    return [(int(first), int(end)) if derived else (0, 0) for (first, end), derived in zip(pairs, number, strict=True)]


def best_splits(
    train: Training,
    layout: Layout,
    pace: Pace,
    most: FloatArray | None = None,
    least: FloatArray | float = 0.0,
    *,
    early: bool = False,
) -> _Found:
    """Return the best split of each candidate.

    `most` is the maximum number of layers of each stage, for each number of leading layers on it: (candidates, leading
    layers, stages). `least` is the minimum of the stage with multi-token prediction, which is the last one or, with
    `early`, the one before.
    """
    total, leading = train.model.num_layers, leading_layers(train)
    if train.options.equal_stages:
        return _best_equal(train, layout, pace, most)
    found, possible = _none(train, layout.pipeline.size), np.ones(layout.pipeline.size, dtype=np.bool_)
    if early:  # Megatron does not add the gradients of two copies of the embedding on the first device
        possible &= (layout.pipeline > 2) | (layout.virtual == 1)
    if most is not None:
        later = np.arange(most.shape[2]) >= layout.pipeline[:, None] - 1.0 - early
        possible &= np.all(later | (most.max(axis=1) >= layout.virtual[:, None]), axis=1)
    for number, fronts in enumerate(all_fronts(train)):
        if fronts.early != early:
            continue
        rows = np.flatnonzero(possible & fronts.fit(layout.pipeline) & ~np.isnan(found.seconds))
        if number and not early and most is None:
            # without virtual stages, a first stage with other layers has all leading layers
            rows = rows[(layout.virtual[rows] > 1) | (found.choice[rows] > 0) | (found.ends[rows, 0] <= leading)]
        if not rows.size:
            continue
        count, limits, middle = layout.pipeline[rows] - len(fronts.leading), None, None
        if most is not None:
            end = layout.pipeline[rows].astype(np.int64)
            held = zip(fronts.leading, fronts.places, strict=True)
            limits = [most[rows, number, place + end * (place < 0)] for number, place in held]
            middle = most[rows, 0, len(fronts.dense) :]
        middles, at_least = Middles.from_limits(count, middle), np.broadcast_to(least, found.seconds.shape)[rows]
        best = search(pace[rows], layout.virtual[rows], total, fronts, middles, limits, at_least)
        better = ~(best.seconds * EQUAL >= found.seconds[rows])  # also if a time is unknown
        rows = rows[better]
        found.choice[rows], found.seconds[rows], found.ends[rows] = number, best.seconds[better], 0.0
        found.ends[rows[:, None], fronts.places] = best.layers[:, better].T
    return found


def _best_equal(train: Training, layout: Layout, pace: Pace, most: FloatArray | None) -> _Found:
    """Return the best splits for releases without layouts, in which all stages between the first and the last are
    equal.
    """
    count, last = layout.pipeline - 2.0, layout.pipeline.astype(np.int64) - 1
    limits = np.full((last.size, int(layout.pipeline.max())), np.inf)
    if most is not None:
        limits[:, 0], limits[:, 1:] = most[:, -1, 0], most[:, 0, 1:]
    place = np.arange(limits.shape[1])
    between = np.where((place > 0) & (place < last[:, None]), limits, np.inf).min(axis=1)
    three = limits[:, 0], between, limits[np.arange(last.size), last]
    best = search_equal(pace, layout.virtual, train.model.num_layers, leading_layers(train), count, three)
    found = _none(train, last.size)
    found.ends[:, [0, -1]] = best.layers.T
    return replace(found, seconds=best.seconds)


def _none(train: Training, size: int) -> _Found:
    """Return a record for `size` candidates that have no split yet."""
    widest = max(len(each.leading) for each in all_fronts(train))
    return _Found(np.zeros(size, dtype=np.int64), np.zeros((size, widest)), np.full(size, np.inf))


def _even(train: Training, layout: Layout, found: _Found) -> BoolArray:
    """Return whether each split in `found` equals the even split."""
    each = train.model.num_layers / layout.pipeline
    even: BoolArray = each % layout.virtual == 0
    for number, fronts in enumerate(all_fronts(train)):
        alike = (found.ends[:, fronts.places] == each[:, None]).all(axis=1) & (not fronts.early)
        if train.model.num_moe_experts is not None:
            for place, count in zip(fronts.places, fronts.leading, strict=True):
                here = np.minimum(place % layout.pipeline, layout.pipeline - 1.0)
                alike &= stage(train.model, layout, here, train.options).dense == count
        even &= (found.choice != number) | alike
    return even


def stage_layers(train: Training, layout: Layout, found: _Found, most: FloatArray | None = None) -> LayerSplit:
    """Return the split of each candidate with the layers of every stage.

    Stages between the first and the last have equal numbers of layers as far as `most` allows. If the layers do not
    divide, the first of these stages have one layer fewer, because they store the most micro-batches.
    """
    longest, total = int(layout.pipeline.max()), train.model.num_layers
    layers, leading = np.zeros((2, layout.pipeline.size, longest))
    place, last = np.arange(longest), layout.pipeline.astype(np.int64) - 1
    early = np.zeros(layout.pipeline.size, dtype=np.bool_)
    for number, fronts in enumerate(all_fronts(train)):
        rows = np.flatnonzero(found.choice == number)
        if not rows.size:
            continue
        early[rows] = fronts.early
        ends, count = found.ends[rows], len(fronts.dense)
        layers[rows, :count], leading[rows, :count] = ends[:, :count], fronts.dense
        layers[rows, last[rows]], leading[rows, last[rows]] = ends[:, -1], fronts.last
        if fronts.between:
            layers[rows, last[rows] - 1] = ends[:, -2]
        limits = np.full((rows.size, longest), np.inf) if most is None else most[rows, 0, :longest]
        middle = (place >= count) & (place < last[rows, None] - fronts.between)
        rest = total - ends.sum(axis=1)
        middles = Middles.from_limits(
            middle.sum(axis=1).astype(np.float64), None if most is None else limits[:, count:]
        )
        level = middles.level(rest)[:, None]
        held = np.where(middle, np.minimum(limits, level), 0.0)
        full = middle & (limits >= level)
        surplus = held.sum(axis=1) - rest
        held -= full & (np.cumsum(full, axis=1) <= surplus[:, None])
        layers[rows] += held
    return LayerSplit(found.seconds, layers, leading, early)


def with_splits(train: Training, layout: Layout, split: LayerSplit) -> tuple[Training, FloatArray]:
    """Return the inputs with further splits, and the number of each candidate's split."""
    before = 1 if train.options.splits is None else len(train.options.splits.lengths)
    columns = [layout.pipeline, layout.virtual, *split.layers.T, *split.leading.T, split.early.astype(np.float64)]
    first, which = distinct(columns)
    splits = splits_of(train, layout[first], split[first])
    return replace(train, options=replace(train.options, splits=splits)), (before + which).astype(np.float64)


def splits_of(train: Training, layout: Layout, split: LayerSplit) -> Splits:
    """Return the splits with these layers on their stages. The final norm follows the last layer, or is at the loss."""
    layers, leading, early = split.layers, split.leading, split.early
    model, place = train.model, np.arange(layers.shape[1])
    end = layout.pipeline[:, None] - 1.0
    first, last = (place == 0) & (end >= 0), place == end
    norm, mtp = last, (place == end - early[:, None]) * float(model.mtp_num_layers)
    if model.mtp_num_layers and not train.options.equal_stages:
        rows = zip(layers, leading, layout.pipeline.astype(int), layout.virtual.astype(int), early, strict=True)
        norm = np.zeros_like(last)
        for row, (held, dense, length, virtual, is_early) in enumerate(rows):
            chunks = _chunks(held, dense, length, virtual, early=is_early)
            norm[row, np.flatnonzero(chunks)[-1] % length] = True
    dense = layers if model.num_moe_experts is None else leading
    table = np.stack((first, last, norm, layers, dense, mtp), axis=2).astype(np.float64)
    return Splits.from_holdings(table, layout.pipeline, train.options.splits)


def _chunks(layers: FloatArray, leading: FloatArray, length: int, virtual: int, *, early: bool) -> list[int]:
    """Return the layers of each virtual stage, in model order, of a split over `length` devices."""
    held, dense = (each[:length].astype(np.int64).tolist() for each in (layers, leading))
    return chunk_layers(held, dense, virtual, early=early)
