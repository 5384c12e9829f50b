"""The network topology of a node group, and the times of collectives within a group and between groups."""

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
"""The default latency of a message between nodes: the value for InfiniBand in Calculon (Isaev et al. 2023)."""

NETWORK_HOP_SECONDS = 4e-6
"""The default time of each ring step between nodes after the first. Source: NCCL 2.30 `tuning.cc`, ring over a network
with the 128-byte protocol."""

NETWORK_EFFICIENCY = 0.9
"""The share of the network rate that large messages reach: the value for InfiniBand in Calculon. Measurements agree:
90 of 100 GB/s for an all-gather over two switched domains, 45.5 of 50 for an all-to-all over two nodes, and 22.6 of 25
for an all-reduce over two nodes with TCP offload."""

COMPUTE_SHARE, NETWORK_COMPUTE_SHARE = 0.15, 0.02
"""The shares of a device's compute that a collective takes: over a link that compute units drive, and over a network.
Source: Calculon."""

EFFICIENCY = {"switch": 0.75, "mesh": 0.75, "ring": 0.75, "pcie": 0.55, "shared-memory": 0.75}
"""The share of a link's rate in one direction that large messages reach, by kind of link. Published curves show 0.69 to
0.80 for a switch on 8 GPUs of five kinds (0.99 with reductions in the switch); 329 of 448 GB/s for a mesh, and 45 of 64
between a pair; and 0.54 to 0.6 for PCIe with two devices. The others are estimated by analogy."""

PCIE_CROWDING, STAGED_CROWDING = 0.35, 1.75
"""The values of `Level.crowding` for PCIe: with peer access, and with copies through host memory. Fitted to two hosts
with 2, 4 and 8 devices. With peer access, the rates were 34.7, 24.5 and 22.1 of 64 GB/s; through host memory, 20.1, 5.2
and 1.4 of 32 GB/s."""


def topology_of(group: NodeGroup) -> Topology:
    """Return the topology of a node group: the chip's link, and the network if there are more devices.

    A link may connect part of a node, a node, or several nodes. Devices of a node that the link does not connect are
    assumed to communicate at the network rate. An unknown network rate is NaN.
    """
    chip, levels = group.chip, []
    linked = 1
    if chip.link is not None:
        linked = min(group.link_domain, group.devices)
        levels.append(_link_level(chip.link, linked))
    if group.devices > linked:
        rate = math.nan if chip.nic_bytes_per_second is None else chip.nic_bytes_per_second.value
        seconds = (chip.nic_latency_seconds or default for default in (NETWORK_LATENCY_SECONDS, NETWORK_HOP_SECONDS))
        levels.append(network_level(group, rate, *seconds))
    return Topology(levels=tuple(levels))


def network_level(
    group: NodeGroup, bytes_per_second: float, latency_seconds: float, hop_seconds: float | None = None
) -> Level:
    """Return the level of the network between nodes, with the usual shares of its rate and of compute."""
    return Level(
        name="network",
        devices=group.devices,
        bytes_per_second=bytes_per_second,
        latency_seconds=latency_seconds,
        hop_seconds=hop_seconds,
        efficiency=NETWORK_EFFICIENCY,
        compute_share=NETWORK_COMPUTE_SHARE,
    )


def _link_level(link: Link, devices: int) -> Level:
    """Return the topology level of `devices` devices that `link` connects."""
    crowding = (PCIE_CROWDING if link.peer_access else STAGED_CROWDING) if link.topology == "pcie" else 0.0
    pair_share = {"mesh": 1.0 / max(devices - 1, 1), "ring": 0.5 if devices > 2 else 1.0}.get(link.topology, 1.0)
    shared = link.topology == "shared-memory"  # the processor copies the data itself, one step after another
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

    Consider a group of n ranks with a payload of S bytes, and a level that is divided into blocks of m ranks of the
    group. Within the innermost block, or within the level on which curves were measured, the time is the time of a
    collective of m ranks. On an outer level, each rank uses its own port, so a block sends through m ports in parallel.

    Libraries pipeline the levels, so the slowest level determines the time, and the start-up times of outer levels are
    added. In a ring, a rank sends (n-1)/n S/m bytes out of its block. In an all-reduce, it sends twice as much, or
    2 (c-1)/c S/m among c blocks if the inner level reduces. In an all-to-all, it sends (n-m)/n S. The time of a send is
    the time on its outermost level.

    `table`: measured curves. None if there are none.
    `grids`: for each kind of collective, its times on the innermost level or on the measured levels, after the index of
    the level that the grid covers, together with all inner levels.
    """

    topology: Topology
    table: CollectiveTable | None = None
    grids: Mapping[str, tuple[int, Grid]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the grids of the innermost level, and of the level on which the table was measured."""
        levels, grids = self.topology.levels, {}
        if levels:
            grids = {kind: (0, model_grid(kind, levels[0])) for kind in KINDS}
        for index, level in enumerate(levels):
            if self.table and (level.name == self.table.level if self.table.level else index == 0):
                grids |= {kind: (index, grid) for kind, grid in measured_grids(self.table, level).items()}
        object.__setattr__(self, "grids", grids)

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective in seconds. It is NaN if the rate of a level that it uses is unknown."""
        count = np.asarray(ranks, dtype=np.float64)
        if not self.topology.levels:
            return np.where(count * np.ones_like(payload_bytes) > 1.0, np.nan, 0.0)
        members, (measured_level, grid) = self._members(count, stride), self.grids[kind]
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
                startup = startup + smooth(self._crossing_startup(kind, outer, members), transfer) - transfer
            time = np.maximum(time, transfer)
        return time + startup

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share of a device's compute that a running collective takes from concurrent kernels."""
        count = np.asarray(ranks, dtype=np.float64)
        share, inner = np.zeros(np.broadcast(count, stride).shape), np.ones_like(count)
        for level, members in zip(self.topology.levels, self._members(count, stride), strict=False):
            share = np.where(members > inner, np.maximum(share, level.compute_share), share)
            inner = members
        return share

    def _members(self, count: FloatArray, stride: IntArray) -> list[FloatArray]:
        """Return, for each level, the number of a group's ranks in one block of the level. On the last level, it is all
        ranks."""
        sizes = [level.devices for level in self.topology.levels[:-1]]
        total = count if count.shape == np.shape(stride) else count * np.ones(np.shape(stride))
        return [np.minimum(np.maximum(np.floor(size / stride), 1.0), total) for size in sizes] + [total]

    def _crossing_seconds(
        self, kind: str, index: int, payload_bytes: FloatArray, count: FloatArray, members: list[FloatArray]
    ) -> FloatArray:
        """Return the transfer time of the bytes that cross the level `index`.

        It is 0 if the group is within one block of the next inner level.
        """
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
        """Return the start-up time of the level `index`: that of a tree for an all-reduce, else that of a ring."""
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
        """Return the time of a message between the two neighbouring ranks of a group that are farthest apart."""
        measured_level, grid = self.grids["send"]
        time = grid.at(payload_bytes, np.minimum(count, 2.0))
        for outer in range(measured_level + 1, len(members)):
            crosses = members[outer - 1] < count
            if crosses.any():
                level = self.topology.levels[outer]
                transfer = payload_bytes / (level.bytes_per_second * level.efficiency)
                time = np.where(crosses, smooth(np.full_like(transfer, level.latency_seconds), transfer), time)
        return time


def between_groups(networks: Sequence[Level], through_hosts: Sequence[KernelCosts] = ()) -> Collectives:
    """Return the costs of collectives between node groups.

    `networks`: the networks of the groups. The lowest rate and the longest latency are used.
    `through_hosts`: the kernel costs of the groups, if messages between them are copied through host memory. Network
    and copies run one after the other, so 1 / rate is the sum over the network and the two slowest host links.
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
