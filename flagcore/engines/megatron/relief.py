"""The fastest split of layers for which memory suffices, of candidates whose fastest one needs more than there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.megatron.balance import best_splits, leading_layers, splits_of, stage_layers
from flagcore.engines.megatron.memory.training import stages_in_use
from flagcore.engines.megatron.parallel.layout import ArrayRecord, Layout, Training, distinct
from flagcore.engines.megatron.parallel.pipeline import Stage, in_flight, stage, with_layers
from flagcore.engines.megatron.time.pace import Pace
from flagcore.engines.megatron.time.step import Blocks

RELIEF = 1.125
"""A split that needs less memory is sought where the fastest one needs up to so many times what a device has. Further
ones fit seldom, and to seek them slows planning down."""

TURNS = 32
"""Limits are corrected at most so many times."""


@dataclass(frozen=True, slots=True)
class _Limits(ArrayRecord):
    """The most layers of each stage, by how many of them are leading dense ones, (candidates, leading ones, stages),
    and where it is known that one more does not fit.
    """

    most: FloatArray
    known: BoolArray


def relieved(
    train: Training, layout: Layout, chosen: BoolArray, share: FloatArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout, BoolArray]:
    """Return the `chosen` candidates with splits for which memory suffices where they need more than a device has, and
    which these are. `share` is what they need of it. The slowest stage is the fastest that memory allows.

    Limits are estimated. Those that decide a split, or that leave none, are checked and corrected, until they hold.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1) & (share > 1.0) & (share <= RELIEF))
    changed = np.zeros(chosen.shape, dtype=np.bool_)
    if not rows.size:
        return train, layout, changed
    few = replace(layout[rows], split=np.zeros(rows.size))
    pace, limits = Pace.of(train, few, costs, blocks[rows]), _estimated(train, few, costs)
    held = np.zeros((2, rows.size, limits.most.shape[2]))
    open_, fits = np.arange(rows.size), np.zeros(rows.size, dtype=np.bool_)
    for _ in range(TURNS):
        now, most = few[open_], limits.most[open_]
        found = best_splits(train, now, pace[open_], most)
        split = np.stack(stage_layers(train, now, found, most))
        there, width = np.isfinite(found.seconds), split.shape[2]
        held[:, open_, :width] = np.where(there[:, None], split, 0.0)
        wrong = _check(train, now, costs, limits, open_, held[:, open_])
        fits[open_] = there & ~wrong
        open_ = open_[wrong]
        if not open_.size:
            break
    rows, few, (layers, leading) = rows[fits], few[np.flatnonzero(fits)], held[:, fits]
    if rows.size:
        first, which = distinct([few.pipeline, few.virtual, *layers.T, *leading.T])
        before = 1 if train.options.splits is None else len(train.options.splits.lengths)
        splits = splits_of(train, few[first], layers[first], leading[first])
        column = layout.split.copy()
        column[rows], changed[rows] = before + which, True
        train, layout = replace(train, options=replace(train.options, splits=splits)), replace(layout, split=column)
    return train, layout, changed


def _check(
    train: Training, layout: Layout, costs: Costs, limits: _Limits, rows: IntArray, held: FloatArray
) -> BoolArray:
    """Correct the limits of `rows` that their splits do not keep, or that may keep them from better ones, and return
    which have such limits. Without a split the layers held are 0.
    """
    (layers, leading), wrong = held, np.zeros(rows.size, dtype=np.bool_)
    none, longest, end = ~layers.any(axis=1), layers.max(axis=1), layout.pipeline.astype(np.int64) - 1
    even = np.ceil(train.model.num_layers / (layout.pipeline * layout.virtual)) * layout.virtual
    longest = np.where(none, even, longest)
    place, kinds = np.arange(layers.shape[1]), np.arange(limits.most.shape[1])[:, None]
    there, first = place <= end[:, None], leading_layers(train)
    turn = there & ~none[:, None] & ((place <= 1) | (place == end[:, None]) | (len(costs.groups) > 1))
    turn[:, 1:] |= there[:, 1:] & (np.diff(held, axis=2) != 0).any(axis=0)
    possible = np.where(kinds == 0, (place > 0) | (first == 0), kinds + place <= first)
    step = _step(train, layout)
    more = there[:, None] & possible & ~limits.known[rows]
    more &= limits.most[rows] + step[:, None, None] <= train.model.num_layers
    if not first:  # there is one arrangement, and only full stages decide
        more &= (none[:, None] | (layers + step[:, None] > limits.most[rows, 0]))[:, None]
    last = np.where(none, np.inf, layers[np.arange(rows.size), end])
    row, where = np.nonzero(turn)
    kind = leading[row, where].astype(np.int64)
    for cells, count, raises in (
        ((row, kind, where), layers[row, where], False),
        (np.nonzero(more), limits.most[rows][more] + step[np.nonzero(more)[0]], True),
    ):
        row, kind, where = cells
        fits = _fits(train, layout[row], costs, where, count, kind.astype(np.float64), longest[row], last[row])
        at, off = (rows[row], kind, where), fits == raises
        limits.known[at] |= ~fits
        limits.most[at] = np.where(off, count - step[row] * (not raises), limits.most[at])
        wrong[row[off]] = True
    return wrong


def _step(train: Training, layout: Layout) -> FloatArray:
    return layout.virtual if train.options.equal_stages else np.ones_like(layout.virtual)


def _fits(
    train: Training,
    layout: Layout,
    costs: Costs,
    place: IntArray,
    layers: FloatArray,
    leading: FloatArray,
    longest: FloatArray,
    end: FloatArray,
) -> BoolArray:
    """Return whether memory suffices for one stage of each candidate with these layers.

    `longest` are the most layers of a device, and `end` those of the last one.
    """
    here = stage(train.model, layout, place.astype(np.float64), train.options)
    dense = layers if train.model.num_moe_experts is None else leading
    longest = np.maximum(longest, layers)
    if train.model.mtp_num_layers and not train.options.equal_stages:
        empty = np.where(here.last > 0, layers, end) <= np.ceil(longest / layout.virtual) * (layout.virtual - 1.0)
        norm = np.where(here.last > 0, ~empty, empty & (place == layout.pipeline - 2.0))
        here = replace(here, final_norm=norm.astype(np.float64))
    (found,) = stages_in_use(train, layout, costs, [with_layers(here, layout, layers, dense, longest)])
    fits: BoolArray = found.used <= found.capacity
    return fits


def _estimated(train: Training, layout: Layout, costs: Costs) -> _Limits:
    """Return about the most layers for which the memory of each stage suffices.

    Memory is taken as linear in layers, and between the second stage and the last but one in micro-batches in flight.
    """
    end = layout.pipeline - 1.0
    places = [np.zeros_like(end), np.minimum(end, 1.0), np.maximum(end - 1.0, 0.0), end]
    here = [stage(train.model, layout, place, train.options) for place in places]
    other = [_one_layer_off(train, layout, each) for each in here]
    memory = stages_in_use(train, layout, costs, [*here, *other])
    slopes, bases = [], []
    for number, (one, two) in enumerate(zip(here, other, strict=True)):
        used = memory[number].used
        slopes.append(np.maximum((used - memory[number + len(here)].used) / (one.layers - two.layers), 1.0))
        bases.append(memory[number].capacity - used + slopes[-1] * one.layers)
    longest, flight = int(layout.pipeline.max()), [in_flight(layout, place, train.options) for place in places]
    kinds = leading_layers(train) + 1
    most = np.zeros((end.size, kinds, longest))
    for place in range(longest):
        index = np.minimum(end, float(place))
        way = in_flight(layout, index, train.options) - flight[1]
        way = way / np.where(flight[2] == flight[1], 1.0, flight[2] - flight[1])
        between = (bases[1] + way * (bases[2] - bases[1])) / (slopes[1] + way * (slopes[2] - slopes[1]))
        room = np.where(index == 0, bases[0] / slopes[0], np.where(index == end, bases[3] / slopes[3], between))
        most[:, :, place] = room[:, None]
    step = _step(train, layout)[:, None, None]
    least = np.maximum(np.arange(kinds) - 1.0, 0.0)[:, None]
    most = np.floor(np.clip(most, least, train.model.num_layers) / step + 1e-6) * step
    return _Limits(most, np.zeros(most.shape, dtype=np.bool_))


def _one_layer_off(train: Training, layout: Layout, held: Stage) -> Stage:
    """Return a stage with a layer less, or one more where it has none to give."""
    off = np.where(held.layers > 1, -1.0, 1.0)
    dense = held.dense + (off if train.model.num_moe_experts is None else 0.0)
    return replace(held, layers=held.layers + off, dense=dense, chunk=(held.layers + off) / layout.virtual)
