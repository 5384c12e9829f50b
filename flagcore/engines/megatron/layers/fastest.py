"""Derives the split of layers over pipeline stages that minimizes the time of the slowest stage and fits memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray
from flagcore.engines.megatron.layers.partition import EQUAL, LayerSplit, Paces, best_splits, leading_layers
from flagcore.engines.megatron.layers.stages import chunk_layers, layout_text
from flagcore.engines.training.critical_path import StageTimes
from flagcore.engines.training.layout import Layout, Placement, Splits, Training, distinct
from flagcore.engines.training.schedules import makespan
from flagcore.engines.training.stages import DENSE, LAYERS, MTP, stage
from flagcore.engines.training.time.pace import DEPENDS_ON
from flagcore.engines.training.time.pipeline import shape_seconds
from flagcore.engines.training.time.step import Blocks

FEW = 4.0
"""Micro-batches per stage from which on the filling of the pipeline is not worth a slower stage."""
SHORT = 8
"""Maximum number of stages of which layers are moved."""
GAIN = 0.01
"""Minimum share of the step by which a move must shorten it, because passes count as a third forward."""


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
    batches = [layouts[0].microbatches * _few_microbatches(train, layouts[0])] if costs.further else []
    depends = (getattr(each, name) for each in layouts for name in DEPENDS_ON)
    first, which = distinct([*depends, *starts, *batches])
    unique = layout[rows[first]]
    paces = Paces.from_blocks(train, unique, costs, blocks[rows[first]])
    found = best_splits(train, unique, paces)
    if train.options.early_mtp and not costs.further:
        early = best_splits(train, unique, paces, early=True)
        found = found.or_else(early, early.seconds * EQUAL + shape_seconds(train, unique, costs) < found.seconds)
    fill_sooner(train, unique, paces, found)
    even = (found.seconds == np.inf) | _even(train, unique, found)
    train, number = with_splits(train, unique, found)
    column = np.zeros_like(layout.pipeline)
    column[rows] = np.where(even, 0.0, number)[which]
    return train, replace(layout, split=column)


def _even(train: Training, layout: Layout, found: LayerSplit) -> BoolArray:
    """Return whether each split in `found` equals the even split."""
    each, place = train.model.num_layers / layout.pipeline, np.arange(found.layers.shape[1])
    alike = (found.layers == each[:, None]) | (place >= layout.pipeline[:, None])
    even: BoolArray = alike.all(axis=1) & (each % layout.virtual == 0) & ~found.early
    if train.model.num_moe_experts is not None:
        for index in range(min(place.size, leading_layers(train) + 1)):
            here = np.minimum(float(index), layout.pipeline - 1.0)
            even &= stage(train.model, layout, here, train.options).dense == found.leading[:, index]
    return even


def _few_microbatches(train: Training, layout: Layout) -> BoolArray:
    """Return for which candidates the time to fill the pipeline counts: 1F1B with few stages and micro-batches."""
    is_short = (layout.microbatches < FEW * layout.pipeline) & (layout.pipeline <= SHORT) & (layout.pipeline > 1.0)
    return np.asarray(is_short & (layout.virtual == 1.0) & (train.options.schedule is None))


def fill_sooner(
    train: Training, layout: Layout, paces: Paces, split: LayerSplit, most: FloatArray | None = None
) -> None:
    """Move single layers of splits on several kinds of chips in place, while a move shortens a step with few
    micro-batches, in which a slower stage may fill the pipeline sooner.

    `most` are the limits of `best_splits`.
    """
    if not paces.starts:
        return
    rows = np.flatnonzero(_few_microbatches(train, layout) & np.isfinite(split.seconds))
    counts = np.arange(train.model.num_layers + 1.0)[:, None]
    for length in np.unique(layout.pipeline[rows]).astype(np.int64).tolist():
        moving = rows[layout.pipeline[rows] == length]
        place, unit, leading = np.arange(length), np.eye(length), split.leading[moving, :length]
        moves = np.stack([unit[taker] - unit[giver] for taker, giver in permutations(range(length), 2)])
        # leading layers are the first of the model: a stage before such a layer has no others
        least = np.maximum(leading, place < length - 1)
        limits = np.where(np.pad(leading[:, 1:], ((0, 0), (0, 1))) > 0, leading, np.inf)
        if most is not None:
            limits = np.minimum(limits, most[moving[:, None], leading.astype(np.int64), place])
        times = np.empty((moving.size, length, counts.size))
        for index in range(length):
            pace, dense, is_last = (
                paces.at(np.full(layout.pipeline.shape, index)),
                leading[:, index],
                index == length - 1,
            )
            held = np.maximum(counts, dense)
            busy = pace[moving].seconds(held, dense, first=index == 0, mtp=is_last, last=is_last)
            times[:, index] = np.where(np.isnan(busy).any(axis=0), counts, busy).T
        held, seconds = split.layers[moving, :length], np.full(moving.size, np.inf)
        tried = held[None]
        while moving.size:
            legal = ((tried >= least) & (tried <= limits)).all(axis=2)
            found = np.where(legal, _step_seconds(tried, times, layout.microbatches[moving]), np.inf)
            chosen, row = found.argmin(axis=0), np.arange(moving.size)
            better = found[chosen, row] < (1.0 - GAIN) * seconds
            moving, held, seconds = moving[better], tried[chosen, row][better], found[chosen, row][better]
            least, limits, times = least[better], limits[better], times[better]
            split.layers[moving, :length] = held
            tried = held + moves[:, None]


def _step_seconds(layers: FloatArray, times: FloatArray, microbatches: FloatArray) -> FloatArray:
    """Return the seconds of 1F1B without messages for each move and candidate; `layers` are (moves, candidates,
    stages), `times` the seconds of a micro-batch as (candidates, stages, layers).
    """
    length = layers.shape[2]
    counts = np.clip(layers, 0.0, times.shape[2] - 1.0).astype(np.int64)
    busy = times[np.arange(len(times))[:, None], np.arange(length), counts].reshape(-1, length).T
    zeros, batches = np.zeros_like(busy), np.tile(microbatches, len(layers))
    stages = StageTimes(forward=busy / 3.0, backward_input=busy * 2.0 / 3.0, backward_weight=zeros, send=zeros[0])
    return makespan("1f1b", stages, batches, np.ones_like(batches)).reshape(len(layers), -1)


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


def with_splits(train: Training, layout: Layout, split: LayerSplit) -> tuple[Training, FloatArray]:
    """Return the inputs with further splits, and the number of each candidate's split. The final norm follows the last
    layer, or is at the loss.
    """
    before, model = train.options.splits, train.model
    columns = [layout.pipeline, layout.virtual, *split.layers.T, *split.leading.T, split.early.astype(np.float64)]
    rows, which = distinct(columns)
    layout, split = layout[rows], split[rows]
    place, end = np.arange(split.layers.shape[1]), layout.pipeline[:, None] - 1.0
    first, last = (place == 0) & (end >= 0), place == end
    norm, mtp = last, (place == end - split.early[:, None]) * float(model.mtp_num_layers)
    if model.mtp_num_layers:
        norm = np.zeros_like(last)
        lengths = layout.pipeline.astype(int), layout.virtual.astype(int)
        for row, (held, dense, length, virtual, early) in enumerate(
            zip(split.layers, split.leading, *lengths, split.early, strict=True)
        ):
            chunks = _chunks(held, dense, length, virtual, early=early)
            norm[row, np.flatnonzero(chunks)[-1] % length] = True
    dense = split.layers if model.num_moe_experts is None else split.leading
    table = np.stack((first, last, norm, split.layers, dense, mtp), axis=2).astype(np.float64)
    splits = Splits.from_holdings(table, layout.pipeline, before)
    number = (1 if before is None else len(before.lengths)) + which
    return replace(train, options=replace(train.options, splits=splits)), number.astype(np.float64)


def _chunks(layers: FloatArray, leading: FloatArray, length: int, virtual: int, *, early: bool) -> list[int]:
    """Return the layers of each virtual stage, in model order, of a split over `length` devices."""
    held, dense = (each[:length].astype(np.int64).tolist() for each in (layers, leading))
    return chunk_layers(held, dense, virtual, early=early)
