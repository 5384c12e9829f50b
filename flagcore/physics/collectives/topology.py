"""The levels over which devices communicate, from the facts of a chip's link and network card."""

from __future__ import annotations

import math

from flagcore.domain.chip import Link
from flagcore.domain.cluster import Level, NodeGroup, Topology

NETWORK_LATENCY_SECONDS = 20e-6
"""First byte of a message between nodes: the figure of Calculon (Isaev et al. 2023) for InfiniBand."""

NETWORK_HOP_SECONDS = 4e-6
"""One further step between nodes: NCCL 2.30 `tuning.cc`, ring over a network with its 128-byte protocol."""

NETWORK_EFFICIENCY = 0.9
"""Calculon's share of InfiniBand; measured: all-gather over two switched domains 90 of 100 GB/s, all-to-all over two
nodes 45.5 of 50, all-reduce over two nodes with a TCP offload 22.6 of 25."""

COMPUTE_SHARE, NETWORK_COMPUTE_SHARE = 0.15, 0.02
"""Share of compute that a collective takes over a link that compute units drive, and over a network (Calculon)."""

EFFICIENCY = {"switch": 0.75, "mesh": 0.75, "ring": 0.75, "pcie": 0.55, "shared-memory": 0.75}
"""Share of one direction's rate that large messages reach. Switch: 8 GPUs of five kinds, 0.69 to 0.80 (0.99 with
reductions in the switch); mesh: 329 of 448 GB/s and 45 of 64 between a pair; PCIe: 0.54 to 0.6 between two devices."""

PCIE_CROWDING, STAGED_CROWDING = 0.35, 1.75
"""How fast a PCIe device's rate falls with the number that talk: 34.7, 24.5, 22.1 GB/s for 2, 4, 8 of 64 (peer
access), 20.1, 5.2, 1.4 of 32 (through host memory). Fitted to these two hosts."""


def topology_of(group: NodeGroup) -> Topology:
    """Return the levels that the chip's link and network card make.

    Bytes per second, seconds. A link may join an island of a node, a node, or several nodes; what carries traffic
    beyond it within a node is not among a chip's facts, so the network card's rate stands for it. A rate that
    is unknown is NaN: what stays inside the link's domain is known.
    """
    chip, levels = group.chip, []
    joined = 1
    if chip.link is not None:
        joined = min(chip.link.domain_size or group.devices_per_node, group.devices)
        levels.append(_link_level(chip.link, joined))
    if group.devices > joined:
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


def _link_level(link: Link, joined: int) -> Level:
    crowding = (PCIE_CROWDING if link.peer_access else STAGED_CROWDING) if link.topology == "pcie" else 0.0
    pair_share = {"mesh": 1.0 / max(joined - 1, 1), "ring": 0.5 if joined > 2 else 1.0}.get(link.topology, 1.0)
    shared = link.topology == "shared-memory"  # the processor itself copies, one step after the other
    return Level(
        name=link.name,
        devices=joined,
        bytes_per_second=link.bytes_per_second.value,
        latency_seconds=link.latency_seconds,
        hop_seconds=link.latency_seconds if shared else None,
        efficiency=EFFICIENCY[link.topology],
        pair_share=pair_share,
        crowding=crowding,
        reduces=link.switch_reduces,
        compute_share=0.0 if link.copy_engine else 1.0 if shared else COMPUTE_SHARE,
    )
