"""Places the bars of a hybrid pattern so that the slowest part of the pattern between two bars is fastest."""

from dataclasses import replace

import numpy as np
from flagcore_training.kinds import layer_kinds
from flagcore_training.layout import Layout, StageLayout, Training, distinct
from flagcore_training.splits import StageLayers
from flagcore_training.stages import splits_of
from flagcore_training.time.stage import (
    Blocks,
    Host,
    Parts,
    Work,
    recomputed_layers,
    recomputed_share,
    work_of,
)

from flagcore.contracts import Costs
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore_megatron.space.stages import stages_with

HALVINGS = 30
"""Bisections of the time of the slowest part: enough for a relative error of 1e-9."""


def place_bars(
    train: Training, layout: Layout, chosen: BoolArray, costs: Costs, blocks: Blocks
) -> tuple[Training, Layout]:
    """Return the inputs with bars for the `chosen` candidates, on one kind of chips. `costs` are the costs in a run.

    Each part, a (virtual) stage, has at least one layer, except the last one, which has the loss. Memory is ignored.
    Parts are filled from the end, so that the first stage, which stores the most micro-batches, has the fewest layers.
    """
    rows = np.flatnonzero(chosen & (layout.pipeline > 1))
    if not rows.size:
        return train, layout
    first, combination = distinct([layout.pipeline[rows], *StageLayout.of(train, layout[rows]).columns])
    unique = layout[rows[first]]
    parts = (unique.pipeline * unique.virtual).astype(np.int64)
    chunks = _parts(*_seconds(train, unique, costs, blocks[rows[first]].on(0)), parts)
    found, number = np.unique(np.column_stack((unique.pipeline, chunks)), axis=0, return_inverse=True)
    splits, before = list[tuple[tuple[StageLayers, ...], int]](), train.options.splits
    for length, *layers in found.astype(np.int64).tolist():
        count = int(parts[number.ravel() == len(splits)][0])
        splits.append((stages_with(layers[:count], train.model.mtp_num_layers), length))
    column = layout.split.copy()
    column[rows] = (1 if before is None else len(before.stage_counts)) + number.ravel()[combination]
    options = replace(train.options, splits=splits_of(train.model, splits, before))
    return replace(train, options=options), replace(layout, split=column)


def _seconds(train: Training, layout: Layout, costs: Costs, parts: Parts) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the seconds of each layer of the model, of shape (candidates, layers), and those of the first part's
    embedding and of the last part's head and multi-token prediction. Each waits for the host by itself.

    If times are unknown, all layers are equal, and the ends take no time.
    """
    host, kinds, total = Host.of(train, costs), layer_kinds(train.model), float(train.model.num_layers)
    share = recomputed_share(recomputed_layers(layout), total / layout.pipeline)
    of_kinds = [work_of(block, layout.selective).busy(share, host) for block in parts.layers]
    layers = np.stack(of_kinds[: len(kinds.layers)], axis=1) @ np.diff(kinds.counts, axis=1)
    ends = (Work(each.forward, each.backward, each.weight, each.forward) for each in (parts.embedding, parts.head))
    first, last = (each.busy(np.zeros(1), host) for each in ends)  # they are not recomputed
    if depths := train.model.mtp_num_layers:
        last = last + depths * of_kinds[-1]
    unknown = np.isnan(layers.sum(axis=1) + first + last)
    return np.where(unknown[:, None], 1.0, layers), np.where(unknown, 0.0, first), np.where(unknown, 0.0, last)


def _parts(layers: FloatArray, first: FloatArray, last: FloatArray, parts: IntArray) -> FloatArray:
    """Return the number of layers of each part, of shape (candidates, parts), with the fastest slowest part.

    `layers`: the seconds of each layer, `first` and `last` those of the ends. `parts`: the number of parts.
    """
    until = np.cumsum(np.pad(layers[:, ::-1], ((0, 0), (1, 0))), axis=1)  # of the last layers
    low, high = np.zeros_like(first), until[:, -1] + first + last
    best = _filled(until, first, last, parts, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        found = _filled(until, first, last, parts, middle)
        fits = found.min(axis=1) >= 0
        best = np.where(fits[:, None], found, best)
        low, high = np.where(fits, low, middle), np.where(fits, middle, high)
    return best


def _filled(until: FloatArray, first: FloatArray, last: FloatArray, parts: IntArray, limit: FloatArray) -> FloatArray:
    """Return the number of layers of each part if no part takes longer than `limit`. Those of the first part are
    negative if one does."""
    too_long = np.zeros(parts.size, dtype=np.bool_)
    row, count = np.arange(parts.size), until.shape[1] - 1
    layers, taken = np.zeros((parts.size, int(parts.max()))), np.zeros(parts.size, dtype=np.int64)
    for place in range(int(parts.max()) - 1):
        room = limit - (last if place == 0 else 0.0) + until[row, taken]
        most = (until <= room[:, None] * (1.0 + 1e-12)).sum(axis=1) - 1
        least = taken + (place > 0)
        ends = np.clip(most, least, np.maximum(count - (parts - 1 - place), least))
        is_open = place < parts - 1
        too_long |= is_open & (ends > np.maximum(most, taken))
        layers[row[is_open], (parts - 1 - place)[is_open]] = (ends - taken)[is_open]
        taken = np.where(is_open, ends, taken)
    remaining = until[:, -1] - until[row, taken] + first + np.where(parts == 1, last, 0.0)
    fits = (remaining <= limit * (1.0 + 1e-12)) & (taken < count) & ~too_long
    layers[:, 0] = np.where(fits, count - taken, -1.0)
    return layers
