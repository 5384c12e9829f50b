"""Finds the layer splits over pipeline stages that minimize the time of the slowest stage and fit in memory."""

from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np
from flagcore_training.critical_path import StageTimes
from flagcore_training.layout import Layout, StageLayout, Training, distinct
from flagcore_training.memory.states import states_of
from flagcore_training.memory.training import stages_in_use
from flagcore_training.schedules import makespan
from flagcore_training.stages import StageGroups, layers_before_last, splits_with, stage, stage_of
from flagcore_training.time.pipeline import shape_seconds
from flagcore_training.time.stage import Blocks
from flagcore_training.weights import stage_parameters

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore_megatron.layers.bars import place_bars
from flagcore_megatron.layers.partition import EQUAL, LayerSplit, Tables, best_splits, leading_layers
from flagcore_megatron.space.options import is_hybrid
from flagcore_megatron.space.stages import chunk_layers, layout_text, may_start_empty

FEW = 4.0
"""With at least this many micro-batches per stage, splits are not changed so that the pipeline fills faster."""
SHORT = 8
"""Maximum number of stages of a pipeline whose layers are moved so that it fills faster."""
GAIN = 0.01
"""Minimum share of a step that a move must save. Smaller gains are uncertain, because a third of the time of a
micro-batch is assumed to be forward."""


def split_layers(
    train: Training, layout: Layout, chosen: BoolArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout]:
    """Return the inputs with the layer splits that minimize the time of the slowest stage, for the `chosen` candidates.

    Memory is ignored. Candidates whose even split is as fast keep it. `costs` are the costs in a run, `blocks` the
    times of the layers of all candidates.
    """
    if is_hybrid(train.model) and not costs.further:
        return place_bars(train, layout, chosen, costs, blocks)
    rows = np.flatnonzero(chosen & (layout.pipeline > 1))
    if not rows.size:
        return train, layout
    layouts, starts = [layout[rows]], StageGroups.from_layout(layout[rows], costs).starts
    layouts += [each.layout for each in layouts[0].further]
    batches = [layouts[0].microbatches * _few_microbatches(train, layouts[0])] if costs.further else []
    depends = (column for each in layouts for column in (each.pipeline, *StageLayout.of(train, each).columns))
    first, combination = distinct([*depends, *starts, *batches])
    unique = layout[rows[first]]
    tables = Tables.from_blocks(train, unique, costs, blocks[rows[first]])
    splits = best_splits(train, unique, tables)
    if train.options.early_mtp and not costs.further:
        early = best_splits(train, unique, tables, early=True)
        sooner = np.flatnonzero(early.seconds * EQUAL + shape_seconds(train, unique, costs) < splits.seconds)
        splits = splits.replaced(sooner, early[sooner])
    splits = fill_sooner(train, unique, tables, splits)
    even = (splits.seconds == np.inf) | _even(train, unique, splits)
    train, number = with_splits(train, unique, splits)
    column = np.zeros_like(layout.pipeline)
    column[rows] = np.where(even, 0.0, number)[combination]
    return train, replace(layout, split=column)


def _even(train: Training, layout: Layout, splits: LayerSplit) -> BoolArray:
    """Return a mask of the candidates whose split in `splits` is the even split."""
    mean_layers, most = train.model.num_layers / layout.pipeline, splits.layers.max(axis=1)[splits.number]
    even: BoolArray = (most == mean_layers) & (mean_layers % layout.virtual == 0) & ~splits.early
    if train.model.experts > 0:
        for index in range(min(splits.leading.shape[1], leading_layers(train) + 1)):
            stage_index, leading = np.minimum(float(index), layout.pipeline - 1.0), splits.leading[:, index]
            even &= stage(train.model, layout, stage_index, train.options).leading == leading[splits.number]
    return even


def _few_microbatches(train: Training, layout: Layout) -> BoolArray:
    """Return a mask of the candidates for which the fill time matters: 1F1B with few stages and micro-batches."""
    is_short = (layout.microbatches < FEW * layout.pipeline) & (layout.pipeline <= SHORT) & (layout.pipeline > 1.0)
    return np.asarray(is_short & (layout.virtual == 1.0) & (train.options.schedule is None))


def fill_sooner(
    train: Training, layout: Layout, tables: Tables, split: LayerSplit, most: FloatArray | None = None
) -> LayerSplit:
    """Return better splits on several kinds of chips for steps with few micro-batches, and the other splits as before.

    Single layers are moved as long as this shortens the step: with a slower stage, the pipeline may fill sooner. `most`
    is the maximum number of layers of each stage, as in `best_splits`.
    """
    if not tables.starts:
        return split
    own = split.layers[split.number], split.leading[split.number]
    split = LayerSplit(split.seconds, np.arange(split.number.size), split.early, *own)
    rows = np.flatnonzero(_few_microbatches(train, layout) & np.isfinite(split.seconds))
    counts = np.arange(train.model.num_layers + 1.0)[:, None]
    for length in np.unique(layout.pipeline[rows]).astype(np.int64).tolist():
        moving = rows[layout.pipeline[rows] == length]
        place, unit, leading = np.arange(length), np.eye(length), split.leading[moving, :length]
        moves = np.stack([unit[target] - unit[source] for target, source in permutations(range(length), 2)])
        # Leading layers are the first ones of the model, so a stage before such a layer has no other layers.
        least = np.maximum(leading, place < length - 1)
        limits = np.where(np.pad(leading[:, 1:], ((0, 0), (0, 1))) > 0, leading, np.inf)
        if most is not None:
            limits = np.minimum(limits, most[moving[:, None], leading.astype(np.int64), place])
        times = np.empty((moving.size, length, counts.size))
        for index in range(length):
            dense, is_last = leading[:, index], index == length - 1
            held = np.maximum(counts, dense)
            ends = {"first": index == 0, "mtp": is_last, "last": is_last}
            busy = tables[moving].stage(np.full(moving.shape, index), dense, **ends).seconds(held)
            times[:, index] = np.where(np.isnan(busy).any(axis=0), counts, busy).T
        held, seconds = split.layers[moving, :length], np.full(moving.size, np.inf)
        tried = held[None]
        while moving.size:
            legal = ((tried >= least) & (tried <= limits)).all(axis=2)
            step_seconds = np.where(legal, _step_seconds(tried, times, layout.microbatches[moving]), np.inf)
            chosen, row = step_seconds.argmin(axis=0), np.arange(moving.size)
            better = step_seconds[chosen, row] < (1.0 - GAIN) * seconds
            moving, held, seconds = moving[better], tried[chosen, row][better], step_seconds[chosen, row][better]
            least, limits, times = least[better], limits[better], times[better]
            split.layers[moving, :length] = held
            tried = held + moves[:, None]
    return split


def _step_seconds(layers: FloatArray, times: FloatArray, microbatches: FloatArray) -> FloatArray:
    """Return the step time with 1F1B in seconds, without messages, for each move of a layer and each candidate.

    `layers` has the shape (moves, candidates, stages). `times` are the seconds of a micro-batch, of shape (candidates,
    stages, layers).
    """
    length = layers.shape[2]
    counts = np.clip(layers, 0.0, times.shape[2] - 1.0).astype(np.int64)
    busy = times[np.arange(len(times))[:, None], np.arange(length), counts].reshape(-1, length).T
    zeros, batches = np.zeros_like(busy), np.tile(microbatches, len(layers))
    stages = StageTimes(forward=busy / 3.0, backward_input=busy * 2.0 / 3.0, backward_weight=zeros, send=zeros[0])
    return makespan("1f1b", stages, batches, np.ones_like(batches)).reshape(len(layers), -1)


def layouts(train: Training, layout: Layout) -> list[str]:
    """Return each candidate's pipeline layout in Megatron's syntax, or "" if it has an even split."""
    depths, last = train.model.mtp_num_layers, stage(train.model, layout, layout.pipeline - 1.0, train.options)
    pairs = zip(virtual_stages(train, layout), last.mtp < depths, strict=True)
    return [layout_text(chunks, depths, early=is_early) if chunks else "" for chunks, is_early in pairs]


def virtual_stages(train: Training, layout: Layout) -> list[list[int]]:
    """Return the number of layers of each candidate's (virtual) stages in model order; empty for an even split."""
    found, splits = [], train.options.splits
    counts = (layout.pipeline * layout.virtual).astype(np.int64)
    for number, count in zip(layout.split.astype(np.int64).tolist(), counts.tolist(), strict=True):
        found.append(splits.chunks[number, :count].astype(np.int64).tolist() if splits and number else [])
    return found


def with_splits(train: Training, layout: Layout, split: LayerSplit) -> tuple[Training, FloatArray]:
    """Return the inputs with `split` added to `Options.splits`, and the number of each candidate's split there."""
    before, model = train.options.splits, train.model
    rows, first_index = distinct([layout.pipeline, layout.virtual, split.number, split.early])
    layout, split = layout[rows], split[rows]
    layers, leading = split.layers[split.number], split.leading[split.number]
    rows, split_index = distinct([layout.pipeline, layout.virtual, *layers.T, *leading.T, split.early])
    layout, early, layers, leading = layout[rows], split.early[rows], layers[rows], leading[rows]
    sizes = layout.pipeline.astype(np.int64), layout.virtual.astype(np.int64)
    tables = np.zeros((len(layers), int((layout.pipeline * layout.virtual).max()), 4))
    for table, held, lead, length, virtual, is_early in zip(tables, layers, leading, *sizes, early, strict=True):
        counts, dense = (each[:length].astype(np.int64).tolist() for each in (held, lead))
        counts = chunk_layers(counts, dense, virtual, early=is_early)
        table[: len(counts), 2] = counts
        table[0, 0] = table[len(counts) - 1, 1] = 1.0
        table[len(counts) - 1 - is_early, 3] = model.mtp_num_layers
    splits = splits_with(model, tables, sizes[0], before)
    number = (1 if before is None else len(before.stage_counts)) + split_index[first_index]
    return replace(train, options=replace(train.options, splits=splits)), number.astype(np.float64)


def fit_splits(
    train: Training, layout: Layout, chosen: BoolArray, share: FloatArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout, BoolArray]:
    """Return the inputs with new splits for `chosen` candidates that exceed memory, and a mask of those that changed.

    A new split fits in memory and minimizes the time of the slowest stage. `share` is the memory in use relative to the
    capacity, for each candidate.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1) & (share > 1.0))
    changed = np.zeros(chosen.shape, dtype=np.bool_)
    if rows.size:
        rows = rows[_may_fit(train, layout[rows], costs)]
    if not rows.size:
        return train, layout, changed
    subset = replace(layout[rows], split=np.ones(rows.size))
    splits = _best_fitting(train, subset, costs, Tables.from_blocks(train, subset, costs, blocks[rows]))
    fits = np.flatnonzero(np.isfinite(splits.seconds))
    if fits.size:
        rows, subset, splits = rows[fits], subset[fits], splits[fits]
        train, number = with_splits(train, subset, splits)
        column = layout.split.copy()
        column[rows], changed[rows] = number, True
        layout = replace(layout, split=column)
    return train, layout, changed


def _may_fit(train: Training, layout: Layout, costs: Costs) -> BoolArray:
    """Return a mask of the candidates whose devices may have room for all layers.

    This is an upper bound: the stages of a node group are assumed to have the room of the group's last stage, which
    stores the fewest micro-batches. The last stage of the pipeline is counted separately, with the fewest layers that
    it may have. A dense layer may move up to `virtual - 1` other layers to virtual stages with fewer micro-batches in
    flight. The result is always true for pipelines with virtual stages and leading layers on every device.
    """
    leading, one = leading_layers(train), np.ones_like(layout.pipeline)
    total, last = train.model.num_layers - leading, layout.pipeline - 1.0
    layout, placement = replace(layout, split=np.ones_like(layout.split)), StageGroups.from_layout(layout, costs)
    counts, weights_room = placement.stages(layout), np.zeros(())
    for mesh, group, count in zip(placement.layouts, costs.groups, counts, strict=True):
        states = states_of(train, mesh, stage_parameters(train, mesh, stage_of(train, mesh, -one, one)))
        per_layer = sum(each.total for each in states)
        weights_room = weights_room + count * np.floor((group.memory.capacity_bytes() or np.inf) / per_layer)
    unknown = (layout.virtual > 1) & (layout.pipeline <= leading)
    may_fit: BoolArray = (weights_room >= total) | (layout.pipeline <= leading)
    rows, stages = np.flatnonzero(may_fit & ~unknown), [*(start - 1.0 for start in placement.starts), last - 1.0, last]
    nowhere = np.full_like(last, -1.0)
    norm, mtp = nowhere if train.model.mtp_num_layers else last, nowhere if train.options.early_mtp else last

    def rooms(rows: IntArray) -> list[_Room]:
        places = [np.maximum(place[rows], 0.0).astype(np.int64) for place in stages]
        none, *ends = np.zeros_like(places[0]), norm[rows], mtp[rows]
        return [_Room(train, costs, layout[rows], none, place, *ends) for place in places]

    # Most candidates have no room: no stage has it for the mean number of layers, nor the last for the remaining ones.
    needed = total - (layout.virtual - 1.0) * leading
    *others, end = rooms(rows)
    mean = np.ceil(needed[rows] / layout.pipeline[rows])
    has_room = end.may_have(needed[rows] - last[rows] * (mean - 1.0))
    for room in others:
        has_room |= room.may_have(mean)
    may_fit[rows], rows = has_room, rows[has_room]
    *others, end = rooms(rows)
    for room, count in zip(others, [*counts[:-1], counts[-1] - 1.0], strict=True):
        needed[rows] -= count[rows] * room.limits()
    may_fit[rows] = end.may_have(needed[rows])
    return may_fit


def _best_fitting(train: Training, layout: Layout, costs: Costs, tables: Tables) -> LayerSplit:
    """Return the best splits that fit in memory.

    If the last virtual stage of the stage with multi-token prediction has no layer, the final norm is on the stage
    before it. These splits are searched separately. Their memory is computed only for the candidates that would be
    faster with them if the memory of the last stage were unlimited.
    """
    most, depths = _layer_limits(train, layout, costs), train.model.mtp_num_layers
    if not depths:  # without depths, the final norm is always on the last stage
        splits = best_splits(train, layout, tables, most)
    else:
        splits = _splits_with_mtp(train, layout, costs, tables, most)
    # Memory is computed last, because it takes most of the time. `bound` is the time of a split without a limit of the
    # last stage; only few candidates would be faster with it.
    may_be_early = train.options.early_mtp and not costs.further
    for early, is_empty in list(product((False, True)[: 1 + may_be_early], (False, True)))[1:] if depths else ():
        bound = _splits_with_mtp(train, layout, None, tables, most, early=early, is_empty=is_empty)
        extra = early * shape_seconds(train, layout, costs)
        rows = np.flatnonzero(bound.seconds + extra < splits.seconds)
        if not rows.size:
            continue
        subset, longest = layout[rows], int(layout.pipeline[rows].max())
        limits = most[rows, :, :longest]
        other_splits = _splits_with_mtp(train, subset, costs, tables[rows], limits, early=early, is_empty=is_empty)
        seconds = other_splits.seconds + extra[rows]
        faster = np.flatnonzero(seconds < splits.seconds[rows])
        splits = splits.replaced(rows[faster], replace(other_splits[faster], seconds=seconds[faster]))
    return fill_sooner(train, layout, tables, splits, most)


def _splits_with_mtp(
    train: Training,
    layout: Layout,
    costs: Costs | None,
    tables: Tables,
    most: FloatArray,
    *,
    early: bool = False,
    is_empty: bool = False,
) -> LayerSplit:
    """Return the best splits with multi-token prediction on the last stage or, with `early`, on the stage before it.

    With `is_empty`, the last virtual stage of the stage with multi-token prediction has no layer. Without `costs`, the
    last stage has no limit.
    """
    mtp, empty = layout.pipeline - 1.0 - early, _layers_beside_empty_stage(train, layout, early=early)
    at_least: FloatArray | float = empty[:, 0] + 1.0
    place, last = np.arange(most.shape[2]), layout.pipeline[:, None, None] - 1.0
    if (early or is_empty) and costs is None:  # an upper bound: only the last stage may hold less than usual
        most = np.where(place == last, float(train.model.num_layers), most)
    elif costs is not None and (early or is_empty):
        norm = (mtp - is_empty) % layout.pipeline
        changed = (place >= np.minimum(mtp[:, None, None], last - 1.0)) | (place == norm[:, None, None])
        changed = changed & _possible(train, layout)
        most = np.where(changed, _limits(train, layout, costs, changed, norm, mtp), most)
    if is_empty:
        index, at_mtp, at_least = np.arange(mtp.size), mtp.astype(np.int64), 0.0
        most[index, :, at_mtp] = np.minimum(most[index, :, at_mtp], empty)
    return best_splits(train, layout, tables, most, at_least, early=early)


def _layers_beside_empty_stage(train: Training, layout: Layout, *, early: bool) -> FloatArray:
    """Return the maximum number of layers of the stage with multi-token prediction if its last virtual stage is empty.

    The shape is (candidates, leading layers): there is a maximum for each number of leading dense layers on this stage.
    """
    kinds, virtual = np.arange(leading_layers(train) + 1.0), layout.virtual[:, None]
    if not early:
        return layers_before_last(train.model, layout)[:, None] + 0.0 * kinds
    return np.where(virtual > 1, virtual - 1.0 + np.maximum(kinds - 1.0, 0.0), 0.0)


def _limits(train: Training, layout: Layout, costs: Costs, requested: BoolArray, *ends: FloatArray) -> FloatArray:
    """Return the maximum number of layers that fits, as (candidates, leading layers, stages); 0 where not `requested`.
    `ends` are the stages with the final norm and with multi-token prediction, by default the last one."""
    last, most = layout.pipeline - 1.0, np.zeros(requested.shape)
    rows, leading, stage = np.nonzero(requested)
    end_stages = [each[rows] for each in ends or (last, last)]
    most[rows, leading, stage] = _Room(train, costs, layout[rows], leading, stage, *end_stages).limits()
    return most


def _possible(train: Training, layout: Layout) -> BoolArray:
    """Return a mask of the possible numbers of leading layers per stage, as (candidates, leading layers, stages)."""
    first, place = leading_layers(train), np.arange(layout.pipeline.max())
    leading = np.arange(first + 1)[:, None]
    possible: BoolArray = np.where(leading == 0, (place > 0) | (first == 0), leading + place <= first)
    return possible & (place < layout.pipeline[:, None, None])


def _layer_limits(train: Training, layout: Layout, costs: Costs) -> FloatArray:
    """Return the maximum number of layers that fits on each stage, as (candidates, leading layers, stages).

    There is a maximum for each number of leading dense layers on the stage. Between the first and the last stage of
    equal chips, later stages without leading layers need less memory. If the second stage may have as many layers as
    the second-to-last, so may all stages between them.
    """
    possible, last = _possible(train, layout), layout.pipeline - 1.0
    place, kinds = np.arange(possible.shape[2]), np.arange(possible.shape[1])[:, None]
    between = possible & (kinds == 0) & (place > 1) & (place < last[:, None, None] - 1.0) & (not costs.further)
    most = _limits(train, layout, costs, possible & ~between)
    second, before = most[:, 0, 1], most[np.arange(last.size), 0, np.maximum(last.astype(np.int64) - 1, 1)]
    np.copyto(most, second[:, None, None], where=between)
    reach = np.where(between, before[:, None, None], most).max(axis=1).sum(axis=1)
    is_needed = (second < before) & ((reach >= train.model.num_layers) | (train.model.mtp_num_layers > 0))
    rows = np.flatnonzero(is_needed & (not costs.further))
    low, high = np.ones_like(rows), last[rows].astype(np.int64) - 1
    while (is_open := high - low > 1).any():  # halve the stages between two whose limits are known
        rows, low, high = rows[is_open], low[is_open], high[is_open]
        fits, most_layers, stage = most[rows, 0, low], most[rows, 0, high], (low + high) // 2
        share = (stage - low) / (high - low)
        guess = np.floor(1.0 / ((1.0 - share) / np.maximum(fits, 0.5) + share / np.maximum(most_layers, 0.5)))
        room = _Room(train, costs, layout[rows], np.zeros_like(stage), stage, last[rows], last[rows])
        most[rows, 0, stage] = room.largest(fits, most_layers + 1.0, guess)
        rows, low, high = np.tile(rows, 2), np.concatenate((low, stage)), np.concatenate((stage, high))
    return most


BATCH_ROWS = 1 << 14
"""Stages per batch: enough to amortize numpy calls, few enough that columns stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Room:
    """The free memory of one stage of each candidate.

    `place` is the index of the stage, and `leading` the number of leading dense layers on it. `norm` is the stage with
    the final norm, `mtp` the stage with multi-token prediction.
    """

    train: Training
    costs: Costs
    layout: Layout
    leading: IntArray
    place: IntArray
    norm: FloatArray
    mtp: FloatArray

    def __getitem__(self, rows: slice | IntArray) -> "_Room":
        parts = {name: getattr(self, name)[rows] for name in ("layout", "leading", "place", "norm", "mtp")}
        return replace(self, **parts)

    def bytes(self, *layers: FloatArray) -> list[FloatArray]:
        """Return the free bytes of the stages for each number of layers.

        They are negative if the layers do not fit, and very large if the capacity is unknown.
        """
        free: list[list[FloatArray]] = [[] for _ in layers]
        for start in range(0, self.place.size, BATCH_ROWS):
            rows = slice(start, start + BATCH_ROWS)
            part = self[rows]
            place, ends = part.place.astype(np.float64), (part.norm, part.mtp)
            stages = [stage_of(self.train, part.layout, place, each[rows], part.leading, *ends) for each in layers]
            for parts, each in zip(free, stages_in_use(self.train, part.layout, self.costs, stages), strict=True):
                parts.append(np.nan_to_num(each.capacity, nan=1e30) - each.used)
        return [np.concatenate([np.zeros(0), *parts]) for parts in free]

    def least(self) -> FloatArray:
        """Return the minimum number of layers of each stage."""
        may_be_empty = (self.place == self.layout.pipeline - 1.0) | (self.place == self.mtp)
        may_be_empty |= (self.place == 0) & may_start_empty(self.train.model)
        return np.asarray(np.maximum(self.leading, self.layout.virtual - may_be_empty))

    def may_have(self, layers: FloatArray) -> BoolArray:
        """Return whether `layers` is at most the result of `limits`, for each stage."""
        may_have: BoolArray = layers < self.least()
        rows = np.flatnonzero(~may_have & (layers <= self.train.model.num_layers))
        may_have[rows] = self[rows].bytes(layers[rows])[0] >= 0
        return may_have

    def limits(self) -> FloatArray:
        """Return the maximum number of layers that fits on each stage.

        If a stage's minimum number of layers does not fit, the result is smaller than this minimum.
        """
        total, fits = self.train.model.num_layers, self.least() - 1.0
        mean = np.clip(np.ceil(total / self.layout.pipeline), fits + 1.0, total - 1.0)
        free, free_with_more = self.bytes(mean, mean + 1.0)
        fits = np.where(free_with_more >= 0, mean + 1.0, np.where(free >= 0, mean, fits))
        fails = np.where(free < 0, mean, np.where(free_with_more < 0, mean + 1.0, total + 1.0))
        layer = np.maximum(free - free_with_more, 1.0)
        return self.largest(fits, fails, mean + np.floor(free / layer), layer)

    def largest(
        self, fits: FloatArray, fails: FloatArray, guess: FloatArray | None = None, layer: FloatArray | float = np.inf
    ) -> FloatArray:
        """Return the maximum number of layers that fits, where `fits` layers fit and `fails` layers do not.

        The search relies on the fact that more layers never need less memory. It starts at `guess`, by default in the
        middle. `layer` is the approximate memory of one layer in bytes.
        """
        fits, fails, steps = fits.copy(), fails.copy(), np.broadcast_to(layer, fits.shape)
        count = np.floor((fits + fails) / 2.0) if guess is None else guess
        unsettled = np.flatnonzero(fits + 1.0 < fails)
        while unsettled.size:
            low, high = fits[unsettled], fails[unsettled]
            tried = np.clip(count[unsettled], low + 1.0, high - 1.0)
            (free,) = self[unsettled].bytes(tried)
            low, high = np.where(free >= 0, tried, low), np.where(free >= 0, high, tried)
            fits[unsettled], fails[unsettled] = low, high
            count[unsettled] = (
                np.floor((low + high) / 2.0) if guess is None else tried + np.floor(free / steps[unsettled])
            )
            unsettled = unsettled[low + 1.0 < high]
        return fits
