"""Times of collectives from latency and bandwidth, for machines of which nothing better is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.domain.space import FloatArray, IntArray

NETWORK_LATENCY_SECONDS = 20e-6
"""Latency of one message between nodes: the figure of Calculon (Isaev et al. 2023) for InfiniBand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Ring collectives over one level: steps x latency + bytes sent / bandwidth. Implements `CollectiveCosts`.

    The level is the smallest that holds the whole group, by its span of ranks x stride devices: a ring is as
    slow as its slowest hop. Formulas: Thakur et al. 2005; all-reduce 2 (n-1)/n S, the others (n-1)/n S, a message
    S. `share` is the part of a link's rate that collectives reach: 0.75 is the middle of what switched
    links, meshes and networks were measured at (0.65 to 0.98).
    """

    topology: Topology
    share: float = 0.75

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective; NaN without a topology. A group of one costs nothing."""
        count = np.asarray(ranks, dtype=np.float64)
        rate, latency = self._level(count * stride)
        steps = np.where(count > 1, count - 1.0, 0.0)
        sent = payload_bytes * steps / np.maximum(count, 1.0)
        if kind == "send":
            steps, sent = np.minimum(steps, 1.0), payload_bytes * np.minimum(steps, 1.0)
        elif kind == "all_reduce":
            steps, sent = 2.0 * steps, 2.0 * sent
        elif kind == "all_to_all":
            steps = np.minimum(steps, 1.0)
        return np.where(count > 1, steps * latency + sent / (rate * self.share), 0.0)

    def _level(self, span: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return bandwidth and latency of the smallest level of at least `span` devices, else of the largest."""
        levels = self.topology.levels
        if not levels:
            unknown = np.full(np.shape(span), np.nan)
            return unknown, unknown
        sizes = np.array([level.devices for level in levels], dtype=np.float64)
        place = np.minimum(np.searchsorted(sizes, span), len(levels) - 1)
        rates = np.array([level.bytes_per_second for level in levels])
        latencies = np.array([level.latency_seconds for level in levels])
        return rates[place], latencies[place]


def topology_of(group: NodeGroup) -> Topology | None:
    """Return the levels that the chip's link and network card make, or None where one that is needed is unknown.

    A link that joins only an island of the node leaves the node as a second level; what carries traffic between
    islands is not among a chip's facts, so the network card's rate stands for it.
    """
    chip, levels = group.chip, []
    joined = 1
    if chip.link is not None:
        joined = min(chip.link.island_size or group.devices_per_node, group.devices_per_node)
        rate, latency = chip.link.bytes_per_second.value, chip.link.latency_seconds
        levels.append(Level(name=chip.link.name, devices=joined, bytes_per_second=rate, latency_seconds=latency))
    if group.devices > joined:
        if chip.nic_bytes_per_second is None:
            return None
        rate = chip.nic_bytes_per_second.value
        levels.append(
            Level(
                name="network",
                devices=group.devices,
                bytes_per_second=rate,
                latency_seconds=NETWORK_LATENCY_SECONDS,
            )
        )
    return Topology(levels=tuple(levels)) if levels else None
