"""The topology of a node group, from the link and the network rate of its chip."""

from __future__ import annotations

import math

from flagcore.domain.chip import Link
from flagcore.domain.cluster import Level, NodeGroup, Topology

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
