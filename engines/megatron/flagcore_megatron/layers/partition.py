"""Finds the best split of layers over the stages of a pipeline, on one or several kinds of chips.

Layers of one kind are equal, so a split is the number of layers of each device, over all its virtual stages. A split is
best if moving any layer to another stage does not make the slowest stage faster. The search starts from an even split
and moves one layer at a time. The ends (the first stages and the last one) are handled one by one. The stages between
them are handled together: those on one kind of chip have equal numbers of layers as far as their limits allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from flagcore_training.layout import ArrayRecord, Layout, StageLayout, Training, distinct, pick
from flagcore_training.stages import StageGroups
from flagcore_training.time.stage import Blocks, LayersWork, WorkTable

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore_megatron.space.stages import may_start_empty

EQUAL = 1.0 + 1e-9
"""Two times count as equal if their ratio is at most this."""

MAX_LEADING = 4
"""Maximum number of leading dense layers for which all placements on the first stages are tried. With more, only equal
numbers per stage are."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The best split of each candidate.

    `seconds` is the time of the slowest stage, inf if no split is possible. `number` is the row of the candidate's
    split in `layers`, the number of layers of each stage, and `leading`, the number of leading dense layers among them:
    (splits, stages). `early` is whether multi-token prediction is on the stage before the last.
    """

    seconds: FloatArray
    number: IntArray
    early: BoolArray
    layers: FloatArray
    leading: FloatArray

    def __getitem__(self, rows: IntArray) -> LayerSplit:
        return LayerSplit(self.seconds[rows], self.number[rows], self.early[rows], self.layers, self.leading)

    def replaced(self, rows: IntArray, other: LayerSplit) -> LayerSplit:
        """Return a copy in which the candidates `rows` have the splits of `other`."""
        used, number = np.unique(other.number, return_inverse=True)
        result = LayerSplit(
            self.seconds.copy(),
            self.number.copy(),
            self.early.copy(),
            *(
                np.concatenate((old, np.pad(new[used], [(0, 0), (0, old.shape[1] - new.shape[1])])))
                for old, new in ((self.layers, other.layers), (self.leading, other.leading))
            ),
        )
        result.seconds[rows], result.early[rows] = other.seconds, other.early
        result.number[rows] = number + len(self.layers)
        return result


@dataclass(frozen=True, slots=True)
class Fronts:
    """A placement of the leading dense layers: how many each of the first stages (`dense`) and the `last` one has.

    A virtual stage before a dense layer has no layer with experts. With `early`, multi-token prediction is on the stage
    before the loss, and the last virtual stage, which computes the loss, has no layer. With `between`, the stage with
    multi-token prediction is between the first stages and the last one; otherwise it is one of the first stages.
    """

    dense: tuple[int, ...]
    last: int = 0
    early: bool = False
    between: bool = False

    @classmethod
    def every(cls, leading: int, *, early: bool) -> list[Fronts]:
        """Return all placements of `leading` leading layers.

        With `early`, placements with early multi-token prediction are included.
        """
        fronts = list(cls._late(leading))
        between = [replace(front, early=True, between=True) for front in fronts if not front.last]
        return [*fronts, *between, *(replace(front, early=True) for front in fronts)] if early else fronts

    @property
    def leading(self) -> tuple[int, ...]:
        """The numbers of leading layers on the first stages, on the stage between (if any), and on the last stage."""
        return (*self.dense, *[0] * self.between, self.last)

    @property
    def places(self) -> list[int]:
        """The pipeline index of each stage in `leading`; negative indices count from the end."""
        return [*range(len(self.dense)), *[-2] * self.between, -1]

    @classmethod
    def _late(cls, leading: int) -> Iterator[Fronts]:
        """Yield the placements of `leading` leading layers without early multi-token prediction. The first placement
        has all of them on the first stage."""
        yield cls((leading,))
        if leading > MAX_LEADING:
            for size in range(1, leading):
                yield cls((*[size] * (leading // size), *[leading % size] * (leading % size > 0)))
            return
        for count in range(1, leading + 1):
            for dense in product(range(1, leading + 1), repeat=count):
                if sum(dense) <= leading and dense != (leading,):
                    yield cls(dense, leading - sum(dense))

    def fit(self, pipeline: FloatArray) -> BoolArray:
        """Return a mask of the sizes in `pipeline` for which this placement is possible."""
        before = pipeline - 1.0 - self.between
        return before == len(self.dense) if self.last or self.early > self.between else before >= len(self.dense)

    def least(self, virtual: FloatArray) -> list[FloatArray]:
        """Return the minimum number of layers of each stage in `leading`, for each candidate.

        Each virtual stage has at least one layer, except the last one of the model and, with early multi-token
        prediction, the one before it. If all devices have leading layers, each may have them on several virtual stages.
        """
        rounds = np.minimum(min(self.leading), np.maximum(virtual - 1.0, 1.0))
        minima, fits_round = [], np.ones(virtual.shape, dtype=np.bool_)
        for count in self.leading:
            fits_round = fits_round & (count > rounds) & (rounds < virtual - self.early)
            chunks = rounds + fits_round if self.last else np.full_like(virtual, float(count > 0))
            minima.append(count + virtual - chunks)
        for place in (-1, -2)[: 1 + self.early]:
            minima[place] = np.maximum(minima[place] - 1.0, float(self.leading[place]))
        return minima

    def most(self, virtual: FloatArray) -> list[FloatArray]:
        """Return the maximum number of layers of each stage in `leading`, for each candidate."""
        full = len(self.dense) - (self.last == 0)
        any_number = np.full_like(virtual, np.inf)
        limits = [np.where(virtual > 1, np.inf, float(count)) for count in self.dense[:full]]
        last = np.where(virtual > 1, np.inf, 0.0) if self.early else any_number
        return [*limits, *[any_number] * (len(self.leading) - 1 - full), last]


def leading_layers(train: Training) -> int:
    """Return the number of dense layers before the first layer with experts."""
    model = train.model
    return 0 if not model.experts else min(model.moe_first_dense_layers, model.num_layers)


@dataclass(frozen=True, slots=True)
class Tables(ArrayRecord):
    """The work of the parts of the model on each node group. `starts`: the first stage of each further group."""

    groups: tuple[WorkTable, ...]
    starts: tuple[FloatArray, ...]

    @classmethod
    def from_blocks(cls, train: Training, layout: Layout, costs: Costs, blocks: Blocks) -> Tables:
        placement = StageGroups.from_layout(layout, costs)
        pairs = zip((StageLayout.of(train, each) for each in placement.layouts), costs.groups, strict=True)
        groups = (WorkTable.from_blocks(train, *pair, blocks, number) for number, pair in enumerate(pairs))
        return cls(tuple(groups), placement.starts)

    def stage(self, place: FloatArray, leading: FloatArray | int, **ends: bool) -> LayersWork:
        """Return the work of stage `place` of each candidate, as `WorkTable.stage` describes it."""
        found = [each.stage(leading, **ends) for each in self.groups]
        return pick(StageGroups(self.starts, ()).group(place), found) if self.starts else found[0]


@dataclass(frozen=True, slots=True)
class Middles(ArrayRecord):
    """The middle stages on one node group, with the indices `low` to `high - 1`: neither the first ones nor the last.

    `count` is the number of these stages, `room` the maximum of their total number of layers. With limits, `limited`
    contains the limits of all stages, the cumulative sums of the sorted limits, and, for each of the sorted limits, the
    number of stages that have at least this limit.
    """

    low: FloatArray
    high: FloatArray
    count: FloatArray
    room: FloatArray
    limited: tuple[FloatArray, ...] = ()

    @classmethod
    def of(cls, low: FloatArray, high: FloatArray, limits: FloatArray | None) -> Middles:
        """Return the middle stages with the indices `low` to `high - 1`.

        `limits` are the maximum numbers of layers of each stage of a pipeline: (candidates, stages).
        """
        count = high - low
        if limits is None:
            return cls(low, high, count, np.where(count > 0, np.inf, 0.0))
        place = np.arange(limits.shape[1])
        is_middle = (place >= low[:, None]) & (place < high[:, None])
        ordered = np.sort(np.where(is_middle, limits, np.inf), axis=1)
        below = np.cumsum(np.where(np.isfinite(ordered), ordered, 0.0), axis=1)
        below = np.concatenate((np.zeros((len(count), 1)), below[:, :-1]), axis=1)
        limited = limits, below, count[:, None] - place
        return cls(low, high, count, np.where(is_middle, limits, 0.0).sum(axis=1), limited)

    def level(self, layers: FloatArray) -> FloatArray:
        """Return the number of layers of the largest middle stage if all middle stages have `layers` in total.

        It is inf if they cannot have that many.
        """
        if self.limited:
            _, below, others = self.limited
            mean_layers = (layers[:, None] - below) / np.maximum(others, 1.0)
            level = np.ceil(np.where(others > 0, mean_layers, 0.0).max(axis=1, initial=0.0))
        else:
            level = np.ceil(layers / np.maximum(self.count, 1.0))
        return np.where(layers > self.room, np.inf, level)

    def spread(self, layers: FloatArray, longest: int) -> FloatArray:
        """Return the number of layers of each middle stage if they have `layers` in total, as (candidates, stages).

        The numbers are equal as far as the limits allow. If the layers do not divide evenly, the first middle stages
        have one layer fewer, because they store the most micro-batches.
        """
        place, level = np.arange(longest), self.level(layers)[:, None]
        is_middle = (place >= self.low[:, None]) & (place < self.high[:, None])
        limits = self.limited[0][:, :longest] if self.limited else np.inf
        stage_layers: FloatArray = np.where(is_middle, np.minimum(limits, level), 0.0)
        full, surplus = is_middle & (limits >= level), stage_layers.sum(axis=1) - layers
        stage_layers -= full & (np.cumsum(full, axis=1) <= surplus[:, None])
        return stage_layers


def best_splits(
    train: Training,
    layout: Layout,
    tables: Tables,
    most: FloatArray | None = None,
    least: FloatArray | float = 0.0,
    *,
    early: bool = False,
) -> LayerSplit:
    """Return the best split of each candidate.

    `most` is the maximum number of layers of each stage, for each number of leading layers on it: (candidates, leading
    layers, stages). `least` is the minimum number of layers of the stage with multi-token prediction, which is the last
    stage or, with `early`, the one before it.
    """
    size, leading = layout.pipeline.size, leading_layers(train)
    none = np.zeros((1, int(layout.pipeline.max())))
    result = LayerSplit(np.full(size, np.inf), np.zeros(size, dtype=np.int64), np.full(size, early), none, none)
    possible, at_least = np.ones(size, dtype=np.bool_), np.broadcast_to(least, result.seconds.shape)
    if early:  # Megatron does not sum the gradients of two copies of the embedding on the first device
        possible &= (layout.pipeline > 2) | (layout.virtual == 1)
    if most is not None:
        later = np.arange(most.shape[2]) >= layout.pipeline[:, None] - 1.0 - early
        room = most.max(axis=1)
        least_layers = np.repeat(layout.virtual[:, None], room.shape[1], axis=1)
        least_layers[:, 0] -= (layout.virtual > 1) & may_start_empty(train.model)
        possible &= np.all(later | (room >= least_layers), axis=1)
        possible &= room.sum(axis=1) >= train.model.num_layers
    for number, fronts in enumerate(Fronts.every(leading, early=train.options.early_mtp)):
        if fronts.early != early:
            continue
        rows = np.flatnonzero(possible & fronts.fit(layout.pipeline))
        if number and not early and most is None:
            # Without virtual stages, a first stage that also has other layers must have all leading layers.
            split = result.number[rows]
            is_other_split = (result.leading[split, 0] < leading) | (result.layers[split, 0] <= leading)
            rows = rows[(layout.virtual[rows] > 1) | is_other_split]
        if not rows.size:
            continue
        best = _search(train, layout[rows], tables[rows], fronts, None if most is None else most[rows], at_least[rows])
        better = np.flatnonzero(best.seconds * EQUAL < result.seconds[rows])
        result = result.replaced(rows[better], best[better])
    return result


def _search(
    train: Training, layout: Layout, tables: Tables, fronts: Fronts, most: FloatArray | None, mtp: FloatArray
) -> LayerSplit:
    """Return the best split of each candidate in which the leading layers are placed as in `fronts`.

    `most` has the limits of `best_splits`, `mtp` is the minimum number of layers of the stage with multi-token
    prediction.
    """
    virtual, last, row = layout.virtual, layout.pipeline - 1.0, np.arange(layout.pipeline.size)
    places = [place + np.where(place < 0, layout.pipeline, 0.0) for place in fronts.places]
    columns = [place.astype(np.int64) for place in places]
    edges = np.clip((0.0 * last, *tables.starts, layout.pipeline), len(fronts.dense), last - fronts.between)
    middles = [Middles.of(low, high, None if most is None else most[:, 0]) for low, high in pairwise(edges)]
    least = np.stack([*fronts.least(virtual), *(group_stages.count * virtual for group_stages in middles)])
    limits = np.stack([*fronts.most(virtual), *(group_stages.room for group_stages in middles)])
    ends, at_mtp = slice(0, len(places)), len(places) - 1 - fronts.early
    least[at_mtp] = np.maximum(least[at_mtp], mtp)
    least[0] -= (virtual > 1) & may_start_empty(train.model)
    if most is not None:
        leading_and_column = zip(fronts.leading, columns, strict=True)
        limits[ends] = np.minimum(limits[ends], [most[row, count, place] for count, place in leading_and_column])
    layers, possible = _start(train.model.num_layers, least, limits, [group_stages.count for group_stages in middles])
    end, stages = len(places) - 1, []
    for number, (place, count) in enumerate(zip(places, fronts.leading, strict=True)):
        is_end = {"first": number == 0, "mtp": number == end - fronts.early, "last": number == end}
        stages.append(tables.stage(place, count, **is_end))
    work = LayersWork.of_stages([*stages, *(each.stage() for each in tables.groups)])
    slowest = _move_layers(work, middles, layers, (least, limits), possible)
    first, split_number = (row, row) if most is not None else distinct([layout.pipeline, *tables.starts, *layers])
    split = np.zeros((2, first.size, int(layout.pipeline.max())))
    for column, count, end_layers in zip(columns, fronts.leading, layers[ends, first], strict=True):
        split[:, np.arange(first.size), column[first]] = end_layers, np.full(first.size, float(count))
    for group_stages, group_layers in zip(middles, layers[len(places) :, first], strict=True):
        split[0] += group_stages[first].spread(group_layers, split.shape[2])
    return LayerSplit(slowest, split_number, np.full(last.size, fronts.early), *split)


def _start(
    total: int, least: FloatArray, limits: FloatArray, counts: Sequence[FloatArray]
) -> tuple[FloatArray, BoolArray]:
    """Return an initial split within the limits, which is even if possible, and whether each candidate has one.

    The first rows of the split are the first and last stages; the other rows are the middle stages of each node group,
    of which there are `counts`.
    """
    ends = len(least) - len(counts)
    number = np.stack([*np.ones_like(least[:ends]), *counts])
    layers = np.clip(np.floor(total / number.sum(axis=0)) * number, least, limits)
    row, remainder_row = np.arange(least.shape[1]), np.where(counts[-1] > 0, len(least) - 1, ends - 1)
    layers[remainder_row, row] += total - layers.sum(axis=0)
    wrong = ((layers < least) | (layers > limits)).any(axis=0)
    filled, unplaced = least.copy(), total - least.sum(axis=0)
    possible = (unplaced >= 0) & (least <= limits).all(axis=0)
    for place in reversed(range(len(least))):
        added = np.clip(unplaced, 0.0, limits[place] - least[place])
        filled[place] += added
        unplaced = unplaced - added
    return np.where(wrong, filled, layers), ~wrong | ((unplaced <= 0) & possible)


def _move_layers(
    work: LayersWork,
    middles: Sequence[Middles],
    layers: FloatArray,
    bounds: tuple[FloatArray, FloatArray],
    possible: BoolArray,
) -> FloatArray:
    """Move single layers in place while this makes the slowest stage faster, and return the slowest stage's seconds.

    The seconds are inf if there is no split. The rows of `work`, `layers` and `bounds` (minimum and maximum) are the
    first and last stages, then the middle stages of each node group.
    """
    slowest, moving = np.full(possible.shape, np.inf), np.flatnonzero(possible)
    # If all candidates have a split, as is usual, the arrays are not indexed, because that would copy them.
    moves, (counts, (least, limits)) = moving, (layers, bounds)
    if moving.size < possible.size:
        counts, least, limits = layers[:, moving], least[:, moving], limits[:, moving]
        work, middles = work[moving], [each[moving] for each in middles]
    now, after = (_seconds(work, middles, counts + added) for added in (0.0, 1.0))
    while moving.size:
        row, source = np.arange(moving.size), np.argmax(now, axis=0)
        allowed = np.where(counts + 1.0 > limits, np.inf, after)
        allowed[source, row] = np.inf
        target = np.argmin(allowed, axis=0)
        slowest[moving] = now[source, row]
        spare = (counts - least)[source, row] >= 1.0
        moves = np.flatnonzero(spare & (allowed[target, row] * EQUAL < now[source, row]))
        if not moves.size:
            break
        moving, counts, least, limits = moving[moves], counts[:, moves], least[:, moves], limits[:, moves]
        now, after, row = now[:, moves], after[:, moves], np.arange(moves.size)
        giver, taker = (source[moves], row), (target[moves], row)
        counts[giver] -= 1.0
        counts[taker] += 1.0
        work, middles = work[moves], [each[moves] for each in middles]
        layers[:, moving] = counts
        # Only the stages of the move changed. Each needs one new time; its other time is one from before the move.
        after[giver], now[taker], more = now[giver], after[taker], np.zeros_like(counts)
        more[taker] = 1.0
        seconds = _seconds(work, middles, counts + more)
        now[giver], after[taker] = seconds[giver], seconds[taker]
    return slowest


def _seconds(work: LayersWork, middles: Sequence[Middles], layers: FloatArray) -> FloatArray:
    """Return the seconds of each of the first and last stages, and of the slowest middle stage on each node group. They
    are -inf for a node group without middle stages. If times are unknown, the result is the number of layers."""
    layer_counts, first = layers.copy(), len(layers) - len(middles)
    for place, stages in enumerate(middles, start=first):
        level = stages.level(layers[place])
        layer_counts[place] = np.where(np.isfinite(level), level, 1.0)
    seconds = work.seconds(layer_counts)
    for place, stages in enumerate(middles, start=first):
        seconds[place, stages.count <= 0] = -np.inf
    return np.where(np.isnan(seconds), layer_counts, seconds)
