"""Times of collectives over the levels of a cluster: from latency and bandwidth, and from measured curves if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flagcore.domain.cluster import Topology
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics.collectives.curves import CollectiveTable, Grid, measured_grids, model_grid
from flagcore.physics.collectives.model import KINDS, PEER_SECONDS, sent_share, smooth, usable_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Collectives over nested levels. Implements `flagcore.contracts.CollectiveCosts`.

    A group of n ranks has m of them in each block of a level. Inside the innermost block (with curves: inside the
    span that they hold for) the time is that of m ranks. Across an outer level each rank uses its own port, so a
    block sends through m ports at once; the slower of inside and outside decides, as a library pipelines the two,
    and the outer level's start-up is added. A rank sends (n-1)/n S/m out of its block in a ring, twice in an
    all-reduce (2 (c-1)/c S/m among c blocks whose inside reduces), (n-m)/n S in an all-to-all. A send pays its
    farthest hop.
    """

    topology: Topology
    table: CollectiveTable | None = None
    grids: Mapping[str, Grid] = field(init=False, repr=False, compare=False)
    measured: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """For each kind the level that its grid is for, with all levels inside it."""

    def __post_init__(self) -> None:
        """Draw the grids, once: of the innermost level, and of the one that the table is for."""
        levels, drawn = self.topology.levels, {}
        if levels:
            drawn = {kind: (0, model_grid(kind, levels[0])) for kind in KINDS}
        for place, level in enumerate(levels):
            if self.table and (level.name == self.table.level if self.table.level else place == 0):
                drawn |= {kind: (place, grid) for kind, grid in measured_grids(self.table, level).items()}
        object.__setattr__(self, "grids", {kind: grid for kind, (_, grid) in drawn.items()})
        object.__setattr__(self, "measured", {kind: place for kind, (place, _) in drawn.items()})

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective; NaN where a level that it needs is unknown, 0 for a group of one."""
        count = np.asarray(ranks, dtype=np.float64)
        if not self.topology.levels:
            return np.where(count * np.ones_like(payload_bytes) > 1.0, np.nan, 0.0)
        members, grid, place = self._members(count, stride), self.grids[kind], self.measured[kind]
        if kind == "send":
            return self._send_seconds(payload_bytes, count, members)
        inside = members[place]
        outside = inside < count
        if place == 0 and not outside.any():
            return grid.at(payload_bytes, inside)
        if kind == "all_to_all":
            time = grid.at(payload_bytes * (inside / count), inside)
        else:
            several = np.maximum(inside, 2.0)
            time = grid.at(payload_bytes, inside) * (sent_share(kind, count) / sent_share(kind, several))
        startup = np.zeros_like(time)
        for outer in range(1, len(members)):
            transfer = self._crossing_seconds(kind, outer, payload_bytes, count, members)
            if outer > place:
                first = self._crossing_startup(kind, outer, members)
                startup = startup + smooth(first, transfer) - transfer
            time = np.maximum(time, transfer)
        return time + startup

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share of compute that a running collective of the group takes from concurrent kernels."""
        count = np.asarray(ranks, dtype=np.float64)
        share, below = np.zeros(np.broadcast(count, stride).shape), np.ones_like(count)
        for level, members in zip(self.topology.levels, self._members(count, stride), strict=False):
            share = np.where(members > below, np.maximum(share, level.compute_share), share)
            below = members
        return share

    def _members(self, count: FloatArray, stride: IntArray) -> list[FloatArray]:
        """Return for each level how many ranks of a group lie in one block of it; in the last, all of them."""
        sizes = [level.devices for level in self.topology.levels[:-1]]
        whole = count if count.shape == np.shape(stride) else count * np.ones(np.shape(stride))
        return [np.minimum(np.maximum(np.floor(size / stride), 1.0), whole) for size in sizes] + [whole]

    def _crossing_seconds(
        self, kind: str, place: int, payload_bytes: FloatArray, count: FloatArray, members: list[FloatArray]
    ) -> FloatArray:
        """Return how long the bytes need that cross level `place`, each rank over its own port; 0 where none do."""
        level, here, below = self.topology.levels[place], members[place], members[place - 1]
        blocks = np.maximum(here / below, 1.0)
        if kind == "all_to_all":
            sent = (here - below) / count
        elif kind == "all_reduce" and self.topology.levels[0].reduces:
            sent = 2.0 * (1.0 - 1.0 / blocks) / below
        else:
            sent = sent_share(kind, count) / below
        rate = level.bytes_per_second * usable_share(level, np.maximum(blocks, 2.0))
        return np.where(here > below, sent * payload_bytes / rate, 0.0)

    def _crossing_startup(self, kind: str, place: int, members: list[FloatArray]) -> FloatArray:
        """Return the start-up that level `place` adds: of a tree for an all-reduce, of a ring for the others."""
        level, inner = self.topology.levels[place], self.topology.levels[0]
        here, below = members[place], members[place - 1]
        blocks = np.maximum(np.ceil(here / below), 1.0)
        if kind == "all_to_all":
            further = (here - below - 1.0) * PEER_SECONDS
        elif kind == "all_reduce":
            further = (2.0 * np.log2(blocks) - 1.0) * level.hop
        else:
            further = (blocks - 2.0) * level.hop + (blocks - 1.0) * (below - 1.0) * inner.hop
        return np.where(here > below, level.latency_seconds + further, 0.0)

    def _send_seconds(self, payload_bytes: FloatArray, count: FloatArray, members: list[FloatArray]) -> FloatArray:
        """Return the time of a message to the farthest neighbour in the group."""
        time = self.grids["send"].at(payload_bytes, np.minimum(count, 2.0))
        for outer in range(self.measured["send"] + 1, len(members)):
            crosses = members[outer - 1] < count
            if crosses.any():
                level = self.topology.levels[outer]
                transfer = payload_bytes / (level.bytes_per_second * level.efficiency)
                time = np.where(crosses, smooth(np.full_like(transfer, level.latency_seconds), transfer), time)
        return time
