"""Times of collectives over the levels of a cluster: from latency and bandwidth, and from measured curves if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from flagcore.domain.cluster import Level, Topology
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics.collective_curves import CollectiveTable, Grid, grids
from flagcore.physics.collective_model import PEER_SECONDS, level_seconds, sent_share, smooth, usable_share


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
    grids: Mapping[str, Grid] = field(default_factory=dict)
    measured_level: int = 0

    @classmethod
    def of(cls, topology: Topology, table: CollectiveTable | None) -> Collectives:
        """Return the collectives of `topology` with the curves of `table` where they hold."""
        places = [place for place, level in enumerate(topology.levels) if table and level.name == table.level]
        if table and not table.level and topology.levels:
            places = [0]
        if table is None or not places:
            return cls(topology=topology)
        return cls(topology=topology, grids=grids(table, topology.levels[places[0]]), measured_level=places[0])

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective; NaN where a level that it needs is unknown, 0 for a group of one."""
        count = np.asarray(ranks, dtype=np.float64)
        if not self.topology.levels:
            return np.where(count * np.ones_like(payload_bytes) > 1.0, np.nan, 0.0)
        members = self._members(count, stride)
        if kind == "send":
            return self._send_seconds(payload_bytes, count, members)
        measured = self.measured_level if kind in self.grids else 0
        inside = members[measured]
        if kind == "all_to_all":
            time = self._inside_seconds(kind, payload_bytes * (inside / count), inside)
        else:
            time = self._inside_seconds(kind, payload_bytes, inside)
        outside = inside < count
        if measured == 0 and not outside.any():
            return time
        if kind != "all_to_all":
            time = time * np.where(
                inside > 1.0, sent_share(kind, count) / np.maximum(sent_share(kind, inside), 0.1), 1.0
            )
        startup = np.zeros_like(time)
        for place in range(1, len(members)):
            transfer = self._crossing_seconds(kind, place, payload_bytes, count, members)
            if place > measured:
                first = self._crossing_startup(kind, place, members)
                startup = startup + smooth(first, transfer) - transfer
            time = np.maximum(time, transfer)
        return time + startup

    def compute_taken(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share of compute that a running collective of the group takes from kernels beside it."""
        count = np.asarray(ranks, dtype=np.float64)
        taken, below = np.zeros(np.broadcast(count, stride).shape), np.ones_like(count)
        for level, members in zip(self.topology.levels, self._members(count, stride), strict=True):
            taken = np.where(members > below, np.maximum(taken, level.compute_taken), taken)
            below = members
        return taken

    def _members(self, count: FloatArray, stride: IntArray) -> list[FloatArray]:
        """Return for each level how many ranks of a group lie in one block of it; in the last, all of them."""
        sizes = [level.devices for level in self.topology.levels[:-1]]
        return [np.minimum(np.maximum(size // stride, 1.0), count) for size in sizes] + [count * np.ones_like(stride)]

    def _inside_seconds(self, kind: str, payload_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
        if kind in self.grids:
            return self.grids[kind].at(payload_bytes, ranks)
        several = np.maximum(ranks, 2.0)
        return np.where(ranks > 1.0, level_seconds(self.topology.levels[0], kind, payload_bytes, several), 0.0)

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
        two = np.full_like(count, 2.0)
        measured = self.measured_level if "send" in self.grids else 0
        time = self._inside_seconds("send", payload_bytes, np.minimum(count, two))
        for place in range(measured + 1, len(members)):
            crosses = members[place - 1] < count
            if crosses.any():
                time = np.where(crosses, _message_seconds(self.topology.levels[place], payload_bytes), time)
        return time


def _message_seconds(level: Level, payload_bytes: FloatArray) -> FloatArray:
    transfer = payload_bytes / (level.bytes_per_second * level.efficiency)
    return smooth(np.full_like(transfer, level.latency_seconds), transfer)
