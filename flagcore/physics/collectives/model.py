"""The volume and the time of a collective on one level, from latency and bandwidth.

Units are bytes and seconds; all functions take arrays. Sources: Thakur et al. 2005 for the volumes of rings, NCCL 2.30
`tuning.cc` for the steps of rings and trees. Libraries change their protocol with the size of a message, so a message
of medium size takes longer than latency + bytes / rate: `smooth` adds `SMOOTHING` x the geometric mean of both.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.cluster import Level
from flagcore.domain.space import FloatArray

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

SMOOTHING = 1.25
"""Fitted to 324 published times of four collectives on five kinds of GPU. Their mean error is 16%; with 0 it is 26%."""

TREE_STEPS = 6.0
"""The number of steps of a tree within a node per doubling of the ranks (NCCL 2.30 `tuning.cc`). A ring has 2 (n-1)."""

PEER_SECONDS = 1e-6
"""The time that each further remote peer adds to an all-to-all: the network overhead of a message in NCCL 2.30."""


def smooth(startup: FloatArray, transfer: FloatArray) -> FloatArray:
    """Return the time of a message from its start-up and its transfer time."""
    return startup + transfer + SMOOTHING * np.sqrt(startup * transfer)


def sent_share(kind: str, ranks: FloatArray) -> FloatArray:
    """Return the share of the payload that a rank sends: 2 (n-1)/n for an all-reduce, (n-1)/n for the others."""
    if kind == "send":
        return np.minimum(ranks - 1.0, 1.0)
    return (2.0 if kind == "all_reduce" else 1.0) * (1.0 - 1.0 / ranks)


def steps(kind: str, ranks: FloatArray) -> FloatArray:
    """Return the number of consecutive messages."""
    if kind == "all_reduce":
        return np.minimum(2.0 * (ranks - 1.0), TREE_STEPS * np.log2(np.maximum(ranks, 2.0)))
    return np.ones_like(ranks) if kind in ("all_to_all", "send") else ranks - 1.0


def startup_seconds(level: Level, kind: str, ranks: FloatArray) -> FloatArray:
    """Return the time of an empty collective of `ranks` > 1 on `level`."""
    return level.latency_seconds + (steps(kind, ranks) - 1.0) * level.hop


def usable_share(level: Level, ranks: FloatArray) -> FloatArray | float:
    """Return the share of its peak rate that a device reaches among `ranks` > 1 devices of `level`."""
    share: FloatArray | float = level.efficiency
    if level.pair_share < 1.0:
        share = share * np.minimum((ranks - 1.0) * level.pair_share, 1.0)
    return share * (2.0 / ranks) ** level.crowding if level.crowding else share


def level_seconds(level: Level, kind: str, payload_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
    """Return the time of a collective of `ranks` > 1 devices within `level`."""
    rate = level.bytes_per_second * usable_share(level, ranks)
    return smooth(startup_seconds(level, kind, ranks), sent_share(kind, ranks) * payload_bytes / rate)
