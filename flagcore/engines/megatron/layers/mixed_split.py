"""Finds the best split of layers over stages on several kinds of chips.

A split is best if the slowest stage is as fast as possible. The search starts from the minimum of each stage and gives
one layer after the other to the stage that is fastest with one more. This is exact, because a stage with more layers is
never faster. With few micro-batches, a slower stage may shorten the step, because the pipeline fills sooner. Then
single layers are moved while this shortens the step.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.layers.partition import Fronts, LayerSplit, all_fronts
from flagcore.engines.training.layout import Layout, Placement, Training
from flagcore.engines.training.schedules.critical_path import StageTimes
from flagcore.engines.training.schedules.formulas import makespan
from flagcore.engines.training.time.pace import Pace
from flagcore.engines.training.time.step import Blocks

FEW = 4.0
"""Micro-batches per stage from which on the filling of the pipeline is not worth a slower stage."""
SHORT = 8
"""Maximum number of stages of which layers are moved."""
GAIN = 0.01
"""Minimum share of the step by which a move must shorten it, because passes count as a third forward."""


def few_microbatches(train: Training, layout: Layout) -> BoolArray:
    """Return for which candidates the time to fill the pipeline counts: 1F1B with few stages and micro-batches."""
    is_short = (layout.microbatches < FEW * layout.pipeline) & (layout.pipeline <= SHORT) & (layout.pipeline > 1.0)
    return np.asarray(is_short & (layout.virtual == 1.0) & (train.options.schedule is None))


def best_mixed_splits(
    train: Training, layout: Layout, costs: Costs, blocks: Blocks, most: FloatArray | None = None
) -> LayerSplit:
    """Return the best split of each candidate. Multi-token prediction is on the last stage. The seconds are those
    before layers are moved.

    `most` is the maximum number of layers of each stage, for each number of leading layers on it: (candidates, leading
    layers, stages).
    """
    paces = [
        Pace.from_blocks(train, each, group, blocks, number)
        for number, (each, group) in enumerate(
            zip(Placement.from_layout(layout, costs).layouts, costs.groups, strict=True)
        )
    ]
    rows, longest = layout.pipeline.size, int(layout.pipeline.max())
    layers, leading = np.zeros((2, rows, longest))
    found = LayerSplit(np.full(rows, np.inf), layers, leading, np.zeros(rows, dtype=np.bool_))
    for fronts in all_fronts(train):
        fitting = np.flatnonzero(fronts.fit(layout.pipeline) & (not fronts.early))
        if not fitting.size:
            continue
        limits = None if most is None else most[fitting]
        best = _search(train, layout[fitting], costs, [each[fitting] for each in paces], fronts, limits)
        better = best.seconds < found.seconds[fitting]
        fitting, best = fitting[better], best[np.flatnonzero(better)]
        wide = best.layers.shape[1]
        found.seconds[fitting], found.layers[fitting, :wide], found.leading[fitting, :wide] = (
            best.seconds,
            best.layers,
            best.leading,
        )
    return found


def _search(
    train: Training, layout: Layout, costs: Costs, paces: list[Pace], fronts: Fronts, most: FloatArray | None
) -> LayerSplit:
    """Return the best split of each candidate with the leading layers of `fronts`."""
    total, last = train.model.num_layers, layout.pipeline.astype(np.int64) - 1
    row, place = np.arange(last.size), np.arange(int(layout.pipeline.max()))
    leading = np.zeros((last.size, place.size), dtype=np.int64)
    layers = np.where(place <= last[:, None], layout.virtual[:, None], 0.0)
    limits = np.where(place <= last[:, None], np.inf, 0.0)
    for here, count, low, high in zip(
        fronts.places, fronts.leading, fronts.least(layout.virtual), fronts.most(layout.virtual), strict=True
    ):
        stage = last if here < 0 else here
        leading[row, stage], layers[row, stage], limits[row, stage] = count, low, high
    if most is not None:
        limits = np.minimum(limits, np.take_along_axis(most[:, :, : place.size], leading[:, None], axis=1)[:, 0])
    least, (kinds, times) = layers.copy(), _kinds(train, layout, costs, paces, leading)
    left = total - layers.sum(axis=1)
    possible = (left >= 0) & (layers <= limits).all(axis=1)
    after = np.where(layers + 1.0 <= limits, _seconds(times, kinds, layers + 1.0), np.inf)
    growing = np.flatnonzero(possible & (left > 0))
    while growing.size:
        # of equal stages, the later one stores fewer micro-batches
        taker = place.size - 1 - np.argmin(after[growing, ::-1], axis=1)
        possible[growing] = enough = np.isfinite(after[growing, taker])
        growing, taker = growing[enough], taker[enough]
        layers[growing, taker] += 1.0
        more = layers[growing, taker] + 1.0
        seconds = times[kinds[growing, taker], np.minimum(more, total).astype(np.int64), growing]
        after[growing, taker] = np.where(more <= limits[growing, taker], seconds, np.inf)
        left[growing] -= 1.0
        growing = growing[left[growing] > 0]
    slowest = np.where(place <= last[:, None], _seconds(times, kinds, layers), 0.0).max(axis=1)
    _move(np.flatnonzero(possible & few_microbatches(train, layout)), layout, times, kinds, layers, (least, limits))
    seconds = np.where(possible, slowest, np.inf)
    return LayerSplit(seconds, layers, leading.astype(np.float64), np.zeros(last.shape, dtype=np.bool_))


def _move(
    rows: IntArray,
    layout: Layout,
    times: FloatArray,
    kinds: IntArray,
    layers: FloatArray,
    bounds: tuple[FloatArray, FloatArray],
) -> None:
    """Move single layers of the candidates `rows` between stages in place, while a move shortens the step.

    `kinds` and `times` are those of `_kinds`, `bounds` the minimum and maximum of the layers of each stage.
    """
    least, most = bounds
    for length in np.unique(layout.pipeline[rows]).astype(np.int64).tolist():
        moving = rows[layout.pipeline[rows] == length]
        unit = np.eye(length)
        moves = np.stack([unit[taker] - unit[giver] for taker, giver in permutations(range(length), 2)])
        seconds = _step(layers[moving, :length][None], moving, layout, times, kinds)[0]
        while moving.size:
            tried = layers[moving, :length] + moves[:, None]
            legal = ((tried >= least[moving, :length]) & (tried <= most[moving, :length])).all(axis=2)
            found = np.where(legal, _step(tried, moving, layout, times, kinds), np.inf)
            chosen, row = found.argmin(axis=0), np.arange(moving.size)
            better = found[chosen, row] < (1.0 - GAIN) * seconds
            moving, seconds = moving[better], found[chosen, row][better]
            layers[moving, :length] = tried[chosen, row][better]


def _step(layers: FloatArray, rows: IntArray, layout: Layout, times: FloatArray, kinds: IntArray) -> FloatArray:
    """Return the seconds of 1F1B without messages: (moves, rows), for layers of the shape (moves, rows, stages)."""
    length = layers.shape[2]
    counts = np.clip(layers, 0.0, times.shape[1] - 1.0).astype(np.int64)
    busy = times[kinds[rows, :length], counts, rows[:, None]].reshape(-1, length).T
    zeros, batches = np.zeros_like(busy), np.tile(layout.microbatches[rows], len(layers))
    stages = StageTimes(forward=busy / 3.0, backward_input=busy * 2.0 / 3.0, backward_weight=zeros, send=zeros[0])
    return makespan("1f1b", stages, batches, np.ones_like(batches)).reshape(len(layers), -1)


def _kinds(
    train: Training, layout: Layout, costs: Costs, paces: list[Pace], leading: IntArray
) -> tuple[IntArray, FloatArray]:
    """Return the kind of each stage, and the seconds of each kind by number of layers: (kinds, layers, candidates).

    Stages of one kind are on the same node group, have as many leading layers, and have the embedding and the loss or
    not. Times are NaN if a cost is unknown; then, stages with equal numbers of layers count as equally fast.
    """
    placement, end = Placement.from_layout(layout, costs), layout.pipeline[:, None] - 1.0
    place = np.arange(leading.shape[1], dtype=np.float64) + np.zeros_like(end)
    group: IntArray = np.zeros(leading.shape, dtype=np.int64)
    for start in placement.starts:
        group += place >= start[:, None]
    codes = ((group * (int(leading.max()) + 1) + leading) * 2 + (place == 0)) * 2 + (place == end)
    found, kinds = np.unique(codes, return_inverse=True)
    counts = np.arange(train.model.num_layers + 1.0)[:, None]
    times = np.empty((found.size, counts.size, end.size))
    for number, code in enumerate(found.tolist()):
        rest, is_last = divmod(code, 2)
        rest, is_first = divmod(rest, 2)
        of_group, dense = divmod(rest, int(leading.max()) + 1)
        held = np.maximum(counts, float(dense))
        first, last = bool(is_first), bool(is_last)
        times[number] = paces[of_group].seconds(held, dense, first=first, mtp=last, last=last)
    unknown = np.isnan(times).any(axis=(0, 1))
    return kinds.reshape(leading.shape), np.where(unknown, counts, times)


def _seconds(times: FloatArray, kinds: IntArray, layers: FloatArray) -> FloatArray:
    """Return the seconds of each stage of each candidate."""
    counts = np.minimum(layers, times.shape[1] - 1.0).astype(np.int64)
    seconds: FloatArray = times[kinds, counts, np.arange(kinds.shape[0])[:, None]]
    return seconds
