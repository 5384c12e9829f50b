"""What a collective sends and how long its steps take on one level: latency and bandwidth, smoothed between them.

Bytes and seconds; all functions take whole columns. Sources: volumes of rings, Thakur et al. 2005; steps of ring and
tree as in NCCL 2.30 `tuning.cc`. A library changes its protocol with the size of a message, so the time of a medium
message exceeds latency + bytes / rate: `smooth` adds `SMOOTHING` x the geometric mean of the two.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.cluster import Level
from flagcore.domain.space import FloatArray

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

SMOOTHING = 1.25
"""Fitted to 324 published times of four collectives on five kinds of GPU; with 0 their mean error is 26%, not 16%."""

TREE_STEPS = 6.0
"""Steps that a tree inside a node takes for each doubling of the ranks; a ring takes 2 (n-1)."""

PEER_SECONDS = 1e-6
"""What each further remote peer adds to an all-to-all: the network overhead of a message in NCCL 2.30."""


def smooth(startup: FloatArray, transfer: FloatArray) -> FloatArray:
    """Return the time of a message from its start-up and its transfer time."""
    return startup + transfer + SMOOTHING * np.sqrt(startup * transfer)


def sent_share(kind: str, ranks: FloatArray) -> FloatArray:
    """Return the part of the payload that a rank sends: 2 (n-1)/n for an all-reduce, (n-1)/n for the others."""
    if kind == "send":
        return np.minimum(ranks - 1.0, 1.0)
    return (2.0 if kind == "all_reduce" else 1.0) * (1.0 - 1.0 / ranks)


def steps(kind: str, ranks: FloatArray) -> FloatArray:
    """Return the number of messages that follow one another."""
    if kind == "all_reduce":
        return np.minimum(2.0 * (ranks - 1.0), TREE_STEPS * np.log2(np.maximum(ranks, 2.0)))
    return np.ones_like(ranks) if kind in ("all_to_all", "send") else ranks - 1.0


def startup_seconds(level: Level, kind: str, ranks: FloatArray) -> FloatArray:
    """Return the time of an empty collective of `ranks` > 1 on `level`."""
    return level.latency_seconds + (steps(kind, ranks) - 1.0) * level.hop


def usable_share(level: Level, ranks: FloatArray) -> FloatArray | float:
    """Return the part of a device's peak rate that it reaches among `ranks` > 1 devices of `level`."""
    share: FloatArray | float = level.efficiency
    if level.pair_share < 1.0:
        share = share * np.minimum((ranks - 1.0) * level.pair_share, 1.0)
    return share * (2.0 / ranks) ** level.crowding if level.crowding else share


def level_seconds(level: Level, kind: str, payload_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the time of a collective of `ranks` > 1 devices that stay on `level`."""
    rate = level.bytes_per_second * usable_share(level, ranks)
    return smooth(startup_seconds(level, kind, ranks), sent_share(kind, ranks) * payload_bytes / rate)
