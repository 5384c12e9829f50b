"""Finds the best split of layers over stages on several kinds of chips.

A split is best if the slowest stage is as fast as possible. The search starts from the minimum of each stage and gives
one layer after the other to the stage that is fastest with one more. This is exact, because a stage with more layers is
never faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Placement, Training
from flagcore.engines.megatron.partition import Fronts, all_fronts
from flagcore.engines.megatron.time.pace import Pace
from flagcore.engines.megatron.time.step import Blocks


@dataclass(frozen=True, slots=True)
class MixedSplit(ArrayRecord):
    """The best split of each candidate.

    `seconds` is the time of the slowest stage, inf if there is no split. `layers` and `leading` are the layers of each
    stage and the leading dense ones among them: (candidates, stages).
    """

    seconds: FloatArray
    layers: FloatArray
    leading: FloatArray


def best_mixed_splits(
    train: Training, layout: Layout, costs: Costs, blocks: Blocks, most: FloatArray | None = None
) -> MixedSplit:
    """Return the best split of each candidate. Multi-token prediction is on the last stage.

    `most` is the maximum number of layers of each stage, for each number of leading layers on it: (candidates, leading
    layers, stages).
    """
    paces = [
        Pace.of(train, each, group, blocks, number)
        for number, (each, group) in enumerate(zip(Placement.of(layout, costs).layouts, costs.groups, strict=True))
    ]
    rows, longest = layout.pipeline.size, int(layout.pipeline.max())
    found = MixedSplit(np.full(rows, np.inf), np.zeros((rows, longest)), np.zeros((rows, longest)))
    for fronts in all_fronts(train):
        some = np.flatnonzero(fronts.fit(layout.pipeline) & (not fronts.early))
        if not some.size:
            continue
        limits = None if most is None else most[some]
        best = _search(train, layout[some], costs, [each[some] for each in paces], fronts, limits)
        better = best.seconds < found.seconds[some]
        some, best = some[better], best[np.flatnonzero(better)]
        wide = best.layers.shape[1]
        found.seconds[some], found.layers[some, :wide], found.leading[some, :wide] = (
            best.seconds,
            best.layers,
            best.leading,
        )
    return found


def _search(
    train: Training, layout: Layout, costs: Costs, paces: list[Pace], fronts: Fronts, most: FloatArray | None
) -> MixedSplit:
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
    kinds, times = _kinds(train, layout, costs, paces, leading)
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
    return MixedSplit(np.where(possible, slowest, np.inf), layers, leading.astype(np.float64))


def _kinds(
    train: Training, layout: Layout, costs: Costs, paces: list[Pace], leading: IntArray
) -> tuple[IntArray, FloatArray]:
    """Return the kind of each stage, and the seconds of each kind by number of layers: (kinds, layers, candidates).

    Stages of one kind are on the same node group, have as many leading layers, and have the embedding and the loss or
    not. Times are NaN if a cost is unknown; then, stages with equal numbers of layers count as equally fast.
    """
    placement, end = Placement.of(layout, costs), layout.pipeline[:, None] - 1.0
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
