"""The topology of a node group, and times of collectives over its levels and between groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.chip import Link
from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.domain.space import FloatArray, IntArray
from flagcore.physics.collective_curves import (
    KINDS,
    PEER_SECONDS,
    CollectiveTable,
    Grid,
    measured_grids,
    model_grid,
    sent_share,
    smooth,
    usable_share,
)

NETWORK_LATENCY_SECONDS = 20e-6
"""The latency of a message between nodes, that of InfiniBand in Calculon (Isaev et al. 2023)."""

NETWORK_HOP_SECONDS = 4e-6
"""The time of each further step between nodes: NCCL 2.30 `tuning.cc`, ring over a network, 128-byte protocol."""

NETWORK_EFFICIENCY = 0.9
"""The efficiency of InfiniBand in Calculon. Measured: all-gather over two switched domains 90 of 100 GB/s, all-to-all
over two nodes 45.5 of 50, all-reduce over two nodes with a TCP offload 22.6 of 25."""

COMPUTE_SHARE, NETWORK_COMPUTE_SHARE = 0.15, 0.02
"""The shares of compute that a collective takes over a link that compute units drive, and over a network (Calculon)."""

EFFICIENCY = {"switch": 0.75, "mesh": 0.75, "ring": 0.75, "pcie": 0.55, "shared-memory": 0.75}
"""The share of the rate in one direction that large messages reach. From published curves: switch 0.69 to 0.80 on 8
GPUs of five kinds, 0.99 with reductions in the switch; mesh 329 of 448 GB/s, and 45 of 64 between a pair; PCIe 0.54 to
0.6 for two devices. The others are estimated by analogy."""

PCIE_CROWDING, STAGED_CROWDING = 0.35, 1.75
"""The `Level.crowding` of PCIe with peer access and through host memory. Fitted to two hosts: with 2, 4 and 8 devices,
34.7, 24.5 and 22.1 of 64 GB/s with peer access; 20.1, 5.2 and 1.4 of 32 GB/s through host memory."""


def topology_of(group: NodeGroup) -> Topology:
    """Return the levels of a node group: the link of its chip, and the network.

    A link may connect part of a node, a node, or several nodes. Devices of a node that the link does not connect are
    assumed to communicate at the network rate. An unknown network rate is NaN.
    """
    chip, levels = group.chip, []
    linked = 1
    if chip.link is not None:
        linked = min(chip.link.domain_size or group.devices_per_node, group.devices)
        levels.append(_link_level(chip.link, linked))
    if group.devices > linked:
        levels.append(
            Level(
                name="network",
                devices=group.devices,
                bytes_per_second=math.nan if chip.nic_bytes_per_second is None else chip.nic_bytes_per_second.value,
                latency_seconds=chip.nic_latency_seconds or NETWORK_LATENCY_SECONDS,
                hop_seconds=chip.nic_latency_seconds or NETWORK_HOP_SECONDS,
                efficiency=NETWORK_EFFICIENCY,
                compute_share=NETWORK_COMPUTE_SHARE,
            )
        )
    return Topology(levels=tuple(levels))


def _link_level(link: Link, devices: int) -> Level:
    crowding = (PCIE_CROWDING if link.peer_access else STAGED_CROWDING) if link.topology == "pcie" else 0.0
    pair_share = {"mesh": 1.0 / max(devices - 1, 1), "ring": 0.5 if devices > 2 else 1.0}.get(link.topology, 1.0)
    shared = link.topology == "shared-memory"  # the processor copies, one step after the other
    return Level(
        name=link.name,
        devices=devices,
        bytes_per_second=link.bytes_per_second.value,
        latency_seconds=link.latency_seconds,
        hop_seconds=link.latency_seconds if shared else None,
        efficiency=EFFICIENCY[link.topology],
        pair_share=pair_share,
        crowding=crowding,
        reduces=link.switch_reduces,
        compute_share=0.0 if link.copy_engine else 1.0 if shared else COMPUTE_SHARE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The time model of collectives over nested levels. Implements `flagcore.contracts.CollectiveCosts`.

    A group of n ranks with a payload of S bytes has m ranks in each block of a level. Within the innermost block, or
    within the level of the measured curves, the time is that of m ranks. On an outer level each rank uses its own port,
    so a block sends through m ports in parallel. Libraries pipeline both levels: the slower one determines the time,
    and the start-up of the outer level is added. A rank sends (n-1)/n S/m bytes out of its block in a ring, twice that
    in an all-reduce (2 (c-1)/c S/m among c blocks whose inner level reduces), and (n-m)/n S in an all-to-all. The time
    of a send is that of its outermost level.
    """

    topology: Topology
    table: CollectiveTable | None = None
    grids: Mapping[str, Grid] = field(init=False, repr=False, compare=False)
    measured: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """The index of the level that the grid of each kind covers, with all inner levels."""

    def __post_init__(self) -> None:
        """Compute the grids of the innermost level, and of the level that the table was measured on."""
        levels, grids = self.topology.levels, {}
        if levels:
            grids = {kind: (0, model_grid(kind, levels[0])) for kind in KINDS}
        for index, level in enumerate(levels):
            if self.table and (level.name == self.table.level if self.table.level else index == 0):
                grids |= {kind: (index, grid) for kind, grid in measured_grids(self.table, level).items()}
        object.__setattr__(self, "grids", {kind: grid for kind, (_, grid) in grids.items()})
        object.__setattr__(self, "measured", {kind: index for kind, (index, _) in grids.items()})

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective: 0 for a group of one rank, NaN if a level that it uses is unknown."""
        count = np.asarray(ranks, dtype=np.float64)
        if not self.topology.levels:
            return np.where(count * np.ones_like(payload_bytes) > 1.0, np.nan, 0.0)
        members, grid, measured_level = self._members(count, stride), self.grids[kind], self.measured[kind]
        if kind == "send":
            return self._send_seconds(payload_bytes, count, members)
        inside = members[measured_level]
        if measured_level == 0 and not (inside < count).any():
            return grid.at(payload_bytes, inside)
        if kind == "all_to_all":
            time = grid.at(payload_bytes * (inside / count), inside)
        else:
            inside_sent = sent_share(kind, np.maximum(inside, 2.0))
            time = grid.at(payload_bytes, inside) * (sent_share(kind, count) / inside_sent)
        startup = np.zeros_like(time)
        for outer in range(1, len(members)):
            transfer = self._crossing_seconds(kind, outer, payload_bytes, count, members)
            if outer > measured_level:
                level_startup = self._crossing_startup(kind, outer, members)
                startup = startup + smooth(level_startup, transfer) - transfer
            time = np.maximum(time, transfer)
        return time + startup

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share of compute that a running collective takes from concurrent kernels."""
        count = np.asarray(ranks, dtype=np.float64)
        share, inner = np.zeros(np.broadcast(count, stride).shape), np.ones_like(count)
        for level, members in zip(self.topology.levels, self._members(count, stride), strict=False):
            share = np.where(members > inner, np.maximum(share, level.compute_share), share)
            inner = members
        return share

    def _members(self, count: FloatArray, stride: IntArray) -> list[FloatArray]:
        """Return for each level the number of ranks of a group in one block of it. The last level has all ranks."""
        sizes = [level.devices for level in self.topology.levels[:-1]]
        total = count if count.shape == np.shape(stride) else count * np.ones(np.shape(stride))
        return [np.minimum(np.maximum(np.floor(size / stride), 1.0), total) for size in sizes] + [total]

    def _crossing_seconds(
        self, kind: str, index: int, payload_bytes: FloatArray, count: FloatArray, members: list[FloatArray]
    ) -> FloatArray:
        """Return the transfer time of the bytes that cross the level `index`, 0 if the group is within a block."""
        level, outer, inner = self.topology.levels[index], members[index], members[index - 1]
        blocks = np.maximum(outer / inner, 1.0)
        if kind == "all_to_all":
            sent = (outer - inner) / count
        elif kind == "all_reduce" and self.topology.levels[0].reduces:
            sent = 2.0 * (1.0 - 1.0 / blocks) / inner
        else:
            sent = sent_share(kind, count) / inner
        rate = level.bytes_per_second * usable_share(level, np.maximum(blocks, 2.0))
        return np.where(outer > inner, sent * payload_bytes / rate, 0.0)

    def _crossing_startup(self, kind: str, index: int, members: list[FloatArray]) -> FloatArray:
        """Return the start-up time of the level `index`: of a tree for an all-reduce, of a ring for the others."""
        level, innermost = self.topology.levels[index], self.topology.levels[0]
        outer, inner = members[index], members[index - 1]
        blocks = np.maximum(np.ceil(outer / inner), 1.0)
        if kind == "all_to_all":
            outer_seconds = (outer - inner - 1.0) * PEER_SECONDS
        elif kind == "all_reduce":
            outer_seconds = (2.0 * np.log2(blocks) - 1.0) * level.hop
        else:
            outer_seconds = (blocks - 2.0) * level.hop + (blocks - 1.0) * (inner - 1.0) * innermost.hop
        return np.where(outer > inner, level.latency_seconds + outer_seconds, 0.0)

    def _send_seconds(self, payload_bytes: FloatArray, count: FloatArray, members: list[FloatArray]) -> FloatArray:
        """Return the time of a message between the two neighbours of a group that are farthest apart."""
        time = self.grids["send"].at(payload_bytes, np.minimum(count, 2.0))
        for outer in range(self.measured["send"] + 1, len(members)):
            crosses = members[outer - 1] < count
            if crosses.any():
                level = self.topology.levels[outer]
                transfer = payload_bytes / (level.bytes_per_second * level.efficiency)
                time = np.where(crosses, smooth(np.full_like(transfer, level.latency_seconds), transfer), time)
        return time


def between_groups(networks: Sequence[Level], through_hosts: Sequence[KernelCosts] = ()) -> Collectives:
    """Return the costs between node groups, from the lowest rate and the longest latency of their networks.

    With the kernels of the groups, `through_hosts`, messages are also copied from the device to the host and back, one
    after the other: 1 / rate is that of the network plus those of the two slowest host links.
    """
    rate = float(np.min([level.bytes_per_second * level.efficiency for level in networks]))
    latency = max(level.latency_seconds for level in networks)
    if through_hosts:
        size = 1e9
        copies = np.array([costs.host_copy_seconds(np.array([0.0, size])) for costs in through_hosts])
        start, end = np.sort(copies, axis=0)[-2:].sum(axis=0).tolist()
        rate, latency = 1 / (1 / rate + (end - start) / size), latency + start
    levels = [
        Level(name=name, devices=devices, bytes_per_second=rate, latency_seconds=latency, efficiency=1.0)
        for name, devices in (("group", 1), ("between groups", 2))
    ]
    return Collectives(topology=Topology(levels=tuple(levels)))
