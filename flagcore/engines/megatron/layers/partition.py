"""Finds the best split of layers over the stages of a pipeline.

Layers of one kind are equal, so a split is the number of layers of each device, over all its virtual stages. A split is
best if no move of one layer to another stage shortens the slowest stage. The search starts from an even split and moves
one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.training.layout import ArrayRecord, Training
from flagcore.engines.training.time.pace import Pace

EQUAL = 1.0 + 1e-9
"""Two times are equal if their ratio is at least this."""

MAX_LEADING = 4
"""Maximum number of leading dense layers for which all placements on the first stages are tried."""


@dataclass(frozen=True, slots=True)
class LayerSplit(ArrayRecord):
    """The best split of each candidate.

    `seconds` is the time of the slowest stage, inf if no split is possible. `layers` and `leading` are the layers of
    each stage and the leading dense ones among them: (candidates, stages). With `early`, multi-token prediction is on
    the stage before the last.
    """

    seconds: FloatArray
    layers: FloatArray
    leading: FloatArray
    early: BoolArray


@dataclass(frozen=True, slots=True)
class Fronts:
    """The placement of the leading dense layers: their number on each of the first stages, and on the last one.

    A virtual stage before a dense layer holds no layer with experts. With `early`, multi-token prediction is on the
    stage before the loss, and the last virtual stage, which has the loss, has no layer. With `between`, the stage with
    multi-token prediction lies between the first stages and the last one; otherwise it is one of the first stages.
    """

    dense: tuple[int, ...]
    last: int = 0
    early: bool = False
    between: bool = False

    @classmethod
    def every(cls, leading: int, *, early: bool) -> list[Fronts]:
        """Return all ways to place `leading` layers; with `early`, also those with early multi-token prediction."""
        found = list(cls.all(leading))
        between = [replace(each, early=True, between=True) for each in found if not each.last]
        return [*found, *between, *(replace(each, early=True) for each in found)] if early else found

    @property
    def leading(self) -> tuple[int, ...]:
        """The leading layers of the first stages, the stage between, and the last one."""
        return (*self.dense, *[0] * self.between, self.last)

    @property
    def places(self) -> list[int]:
        """The columns of these stages in an array of the ends of splits."""
        return [*range(len(self.dense)), *[-2] * self.between, -1]

    @classmethod
    def all(cls, leading: int) -> Iterator[Fronts]:
        """Yield all placements of `leading` layers; the first one has all of them on the first stage."""
        yield cls((leading,))
        if leading > MAX_LEADING:
            for each in range(1, leading):
                yield cls((*[each] * (leading // each), *[leading % each] * (leading % each > 0)))
            return
        for count in range(1, leading + 1):
            for dense in product(range(1, leading + 1), repeat=count):
                if sum(dense) <= leading and dense != (leading,):
                    yield cls(dense, leading - sum(dense))

    def fit(self, pipeline: FloatArray) -> BoolArray:
        """Return which pipelines allow this placement."""
        before = pipeline - 1.0 - self.between
        return before == len(self.dense) if self.last or self.early > self.between else before >= len(self.dense)

    def least(self, virtual: FloatArray) -> list[FloatArray]:
        """Return the minimum number of layers of these stages: one on each virtual stage, except the last one of the
        model and, with early multi-token prediction, the one before it.

        If all devices have leading layers, each may have them on several virtual stages.
        """
        rounds = np.minimum(min(self.leading), np.maximum(virtual - 1.0, 1.0))
        found, on = [], np.ones(virtual.shape, dtype=np.bool_)
        for count in self.leading:
            on = on & (count > rounds) & (rounds < virtual - self.early)
            chunks = rounds + on if self.last else np.full_like(virtual, float(count > 0))
            found.append(count + virtual - chunks)
        for place in (-1, -2)[: 1 + self.early]:
            found[place] = np.maximum(found[place] - 1.0, float(self.leading[place]))
        return found

    def most(self, virtual: FloatArray) -> list[FloatArray]:
        """Return the maximum number of layers of these stages."""
        full = len(self.dense) - (self.last == 0)
        any_number = np.full_like(virtual, np.inf)
        limits = [np.where(virtual > 1, np.inf, float(count)) for count in self.dense[:full]]
        last = np.where(virtual > 1, np.inf, 0.0) if self.early else any_number
        return [*limits, *[any_number] * (len(self.leading) - 1 - full), last]


def all_fronts(train: Training) -> list[Fronts]:
    """Return all ways to place the leading dense layers and multi-token prediction."""
    return Fronts.every(leading_layers(train), early=train.options.early_mtp)


def leading_layers(train: Training) -> int:
    """Return the number of dense layers before the first layer with experts."""
    model = train.model
    return 0 if model.num_moe_experts is None else min(model.moe_first_dense_layers, model.num_layers)


@dataclass(frozen=True, slots=True)
class Middles:
    """The stages between the first ones and the last: their number and, with limits, the cumulative sums of the sorted
    limits and the number of stages above each limit.
    """

    count: FloatArray
    room: FloatArray
    below: FloatArray | None = None
    others: FloatArray | None = None

    @classmethod
    def from_limits(cls, count: FloatArray, limits: FloatArray | None) -> Middles:
        """`limits` are the maximum numbers of layers of each stage, as (candidates, stages); 0 after the last stage."""
        if limits is None:
            return cls(count, np.where(count > 0, np.inf, 0.0))
        there = np.arange(limits.shape[1]) < count[:, None]
        ordered = np.sort(np.where(there, limits, np.inf), axis=1)
        below = np.cumsum(np.where(np.isfinite(ordered), ordered, 0.0), axis=1)
        below = np.concatenate((np.zeros((len(count), 1)), below[:, :-1]), axis=1)
        return cls(count, np.where(there, limits, 0.0).sum(axis=1), below, count[:, None] - np.arange(limits.shape[1]))

    def __getitem__(self, rows: IntArray) -> Middles:
        below = None if self.below is None else self.below[rows]
        others = None if self.others is None else self.others[rows]
        return Middles(self.count[rows], self.room[rows], below, others)

    def level(self, layers: FloatArray) -> FloatArray:
        """Return the layers of the largest of these stages if they have `layers` in total; inf if impossible."""
        if self.below is None or self.others is None:
            level = np.ceil(layers / np.maximum(self.count, 1.0))
        else:
            each = (layers[:, None] - self.below) / np.maximum(self.others, 1.0)
            level = np.ceil(np.where(self.others > 0, each, 0.0).max(axis=1, initial=0.0))
        return np.where(layers > self.room, np.inf, level)


@dataclass(frozen=True, slots=True)
class Ends:
    """The layers of the first stages and of the last one, as (stages, candidates), and the seconds of the slowest
    stage, inf if there is no split.
    """

    layers: FloatArray
    seconds: FloatArray


def search(
    pace: Pace,
    virtual: FloatArray,
    total: int,
    fronts: Fronts,
    middles: Middles,
    most: Sequence[FloatArray] | None = None,
    mtp: FloatArray | float = 0.0,
) -> Ends:
    """Return the best split with the leading layers of `fronts`, within the maximum numbers of layers of the first
    stages and the last, and with the minimum number on the stage with multi-token prediction.
    """
    least = np.stack(fronts.least(virtual))
    place = -1 - fronts.early
    least[place] = np.maximum(least[place], mtp)
    limits = np.stack(fronts.most(virtual) if most is None else [*map(np.minimum, fronts.most(virtual), most)])
    ends, possible = _start(total, least, limits, middles, virtual)
    slowest = np.full(virtual.shape, np.inf)
    moving = np.flatnonzero(possible)
    # Most candidates have a split: then the arrays are used as they are, because indexing copies them.
    moving_pace, moving_middles, moving_ends = pace, middles, ends
    if moving.size < virtual.size:
        moving_pace, moving_middles, moving_ends = pace[moving], middles[moving], ends[:, moving]
        least, limits = least[:, moving], limits[:, moving]
    while moving.size:
        rest = total - moving_ends.sum(axis=0)
        now = _stage_seconds(moving_pace, fronts, moving_ends)
        after = _stage_seconds(moving_pace, fronts, moving_ends + 1.0)
        after = np.where(moving_ends + 1.0 > limits, np.inf, after)
        now = np.vstack((now, _middle_seconds(moving_pace, moving_middles, rest, -np.inf)))
        after = np.vstack((after, _middle_seconds(moving_pace, moving_middles, rest + 1.0, np.inf)))
        row, giver = np.arange(moving.size), np.argmax(now, axis=0)
        spare = np.vstack((moving_ends - least, rest - moving_middles.count * virtual[moving]))[giver, row] >= 1.0
        after[giver, row] = np.inf
        taker = np.argmin(after, axis=0)
        slowest[moving] = now[giver, row]
        goes = np.flatnonzero(spare & (after[taker, row] * EQUAL < now[giver, row]))
        moved = np.vstack((moving_ends, rest))[:, goes]
        moved[giver[goes], np.arange(goes.size)] -= 1.0
        moved[taker[goes], np.arange(goes.size)] += 1.0
        moving = moving[goes]
        moving_pace, moving_middles = moving_pace[goes], moving_middles[goes]
        least, limits = least[:, goes], limits[:, goes]
        ends[:, moving] = moving_ends = moved[:-1]
    return Ends(ends, slowest)


def search_equal(
    pace: Pace, virtual: FloatArray, total: int, leading: int, count: FloatArray, most: Sequence[FloatArray]
) -> Ends:
    """Return the best split with equal numbers of layers on `count` stages between the first and the last, and on all
    virtual stages of a device.

    `most` are the maximum numbers of layers of the first stage, of one between, and of the last. The first stage has
    all leading layers.
    """
    units, limits = total / virtual, [np.floor(each / virtual) for each in most]
    least = np.full_like(units, max(leading, 1.0))

    def both(first: FloatArray, rest: FloatArray) -> tuple[FloatArray, FloatArray]:
        last = pace.seconds((rest - first) * virtual, 0, mtp=True, last=True)
        return pace.seconds(first * virtual, leading, first=True), last

    def ends(middle: FloatArray) -> tuple[FloatArray, FloatArray]:
        rest = units - count * middle
        low, high = np.maximum(least, rest - limits[2]), np.minimum(limits[0], rest - 1.0)
        first, seconds = _crossing(low, high, lambda first: both(first, rest))
        return first, np.where(low <= high, seconds, np.inf)

    def all_three(middle: FloatArray) -> tuple[FloatArray, FloatArray]:
        here = np.where(middle > limits[1], np.inf, pace.seconds(middle * virtual, 0))
        return np.where(count > 0, here, -np.inf), ends(middle)[1]

    ones = np.ones_like(units)
    high = np.where(count > 0, np.floor((units - least - 1.0) / np.maximum(count, 1.0)), 1.0)
    middle, seconds = _crossing(ones, high, all_three)
    first = ends(middle)[0]
    possible = (units % 1.0 == 0) & (high >= 1.0)
    layers = np.stack((first, units - count * middle - first)) * virtual
    return Ends(layers, np.where(possible, seconds, np.inf))


def _crossing(
    low: FloatArray, high: FloatArray, figures: Callable[[FloatArray], tuple[FloatArray, FloatArray]]
) -> tuple[FloatArray, FloatArray]:
    """Return the number from `low` to `high` that minimizes the larger of two figures, and this minimum.

    The first figure increases with the number, and the second decreases.
    """
    start, end = low, high
    while (start < end).any():
        half = np.floor((start + end) / 2.0)
        increasing, decreasing = figures(half)
        reached = increasing >= decreasing
        start, end = np.where((start < end) & ~reached, half + 1.0, start), np.where(reached & (start < end), half, end)
    before = np.maximum(start - 1.0, low)
    here, less = np.maximum(*figures(start)), np.maximum(*figures(before))
    return np.where(less <= here, before, start), np.minimum(less, here)


def _start(
    total: int, least: FloatArray, limits: FloatArray, middles: Middles, virtual: FloatArray
) -> tuple[FloatArray, BoolArray]:
    """Return an even split, or another one within the limits, and which candidates have a split."""
    stages = len(least) + middles.count
    ends = np.clip(np.floor(total / stages), least, limits)
    alone = middles.count == 0
    ends[-1] = np.where(alone, total - ends[:-1].sum(axis=0), ends[-1])
    rest = total - ends.sum(axis=0)
    wrong = (rest < middles.count * virtual) | (rest > middles.room) | ((ends < least) | (ends > limits)).any(axis=0)
    filled, left = least.copy(), total - least.sum(axis=0)
    left = left - np.minimum(left, middles.room)
    for place in reversed(range(len(least))):
        more = np.clip(left, 0.0, limits[place] - least[place])
        filled[place] += more
        left = left - more
    enough = (total - least.sum(axis=0) >= middles.count * virtual) & (least <= limits).all(axis=0)
    return np.where(wrong, filled, ends), ~wrong | ((left <= 0) & enough)


def _stage_seconds(pace: Pace, fronts: Fronts, layers: FloatArray) -> FloatArray:
    end = len(layers) - 1
    return np.stack(
        [
            pace.seconds(each, leading, first=place == 0, mtp=place == end - fronts.early, last=place == end)
            for place, (each, leading) in enumerate(zip(layers, fronts.leading, strict=True))
        ]
    )


def _middle_seconds(pace: Pace, middles: Middles, layers: FloatArray, without: float) -> FloatArray:
    level = middles.level(layers)
    known = np.isfinite(level) & (middles.count > 0)
    return np.where(known, pace.seconds(np.where(known, level, 1.0), 0), np.where(middles.count > 0, np.inf, without))
