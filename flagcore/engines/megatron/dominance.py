"""Which candidates need, or take, at least as much as a given one: one order a knob, one rule for all.

A row stands above a candidate if it is not below it on any ordered axis and equal on every other knob.
The orders hold whatever the model is: a larger micro batch keeps more activations, a gradient buffer or
optimizer that is not sharded takes more, recompute trades time for memory. Sequence parallelism shards what layers
keep, but brings a buffer of its own: where layers are recomputed in full that may be more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import Candidate
from flagcore.domain.space import BoolArray, Columns, IntArray
from flagcore.engines.megatron.knobs import BLOCK, SPACE_KNOBS, candidate_columns

RECOMPUTE = ("use_recompute", "recompute_granularity", "recompute_method", "recompute_num_layers")
MEMORY_ORDER = {knob.name: knob.memory_order for knob in SPACE_KNOBS if knob.memory_order}
"""Knobs with an order of memory; recompute has one of its own."""


def needs_at_least(columns: Columns, candidate: Candidate) -> BoolArray:
    """Return which rows need at least as much memory as `candidate` with the same model and cluster."""
    other = candidate_columns(candidate.as_dict())
    same = (columns["sequence_parallel"] == other["sequence_parallel"]) | ((_level(columns) < 2) & (_level(other) < 2))
    result: BoolArray = _above(columns, other, MEMORY_ORDER) & _recomputes_at_most(columns, other) & same
    return result


def takes_at_least(columns: Columns, candidate: Candidate) -> BoolArray:
    """Return which rows do the work of `candidate` and recompute at least as much besides."""
    other = candidate_columns(candidate.as_dict())
    return _above(columns, other, {}) & _recomputes_at_most(other, columns)


def _above(columns: Columns, other: Columns, order: Mapping[str, int]) -> BoolArray:
    plain = [knob.name for knob in SPACE_KNOBS if knob.name not in order and knob.name not in RECOMPUTE]
    equal = [columns[knob] == other[knob] for knob in plain]
    above = [(columns[knob] - other[knob]) * sign >= 0 for knob, sign in order.items()]
    result: BoolArray = np.logical_and.reduce([*equal, *above])
    return result


def _recomputes_at_most(less: Columns, more: Columns) -> BoolArray:
    """Return where `less` surely recomputes no more than `more`: not at all, or fewer layers by block.

    Selective and full recompute have no order: some layers in full may keep the scores of the others.
    """
    low, high = _level(less), _level(more)
    same_method = less["recompute_method"] == more["recompute_method"]
    layers, others = less["recompute_num_layers"], more["recompute_num_layers"]
    block = (less["recompute_method"] == BLOCK) & (layers <= others)
    same: BoolArray = same_method & ((layers == others) | block)
    result: BoolArray = (low == 0) | ((low == high) & same)
    return result


def _level(columns: Columns) -> IntArray:
    """Return 0 without recompute, 1 selective, 2 full."""
    level: IntArray = columns["use_recompute"] * columns["recompute_granularity"]
    return level
