"""The C500 node: two islands of four devices behind MetaXLink bridges, and PCIe between them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, IntArray

ISLAND = 4
"""The vendor's bridge joins two or four cards; `mx-smi topo -m` shows MX inside and NODE or SYS between."""

ACROSS_BYTES_PER_SECOND = 65.1e9
LATENCY_SECONDS = 18.8e-6
"""All-reduce over all eight devices, bus bandwidth at 1 GiB and fitted start-up: MCCL 2.32 on C500, published in
wangzheng422/docker_env 2025.12.metax.mccl.perf.debug.md 3.1. Nobody published one island's rate: it is at least this.
"""

NIC_BYTES_PER_SECOND = 50e9 / ISLAND
"""One 400 Gb/s adapter an island, shared by its devices (same source)."""

BETWEEN_NODES_SECONDS = 65.0e-6


def c500_topology(group: NodeGroup) -> Topology:
    """Return island, node and, for several nodes, network."""
    node = group.devices_per_node
    levels = []
    if node > ISLAND:
        levels.append(("island", ISLAND, ACROSS_BYTES_PER_SECOND, LATENCY_SECONDS))
    levels.append(("node", node, ACROSS_BYTES_PER_SECOND, LATENCY_SECONDS))
    if group.nodes > 1:
        levels.append(("network", group.devices, NIC_BYTES_PER_SECOND, BETWEEN_NODES_SECONDS))
    return Topology(
        levels=tuple(
            Level(name=name, devices=devices, bytes_per_second=rate, latency_seconds=latency)
            for name, devices, rate, latency in levels
        )
    )


class StayInsideIsland:
    """`flagcore.contracts.PruningRule`: tensor and expert parallelism across the islands is not worth a trial."""

    name = "metax_c500_island"
    says = "tensor and expert parallelism of a C500 stay inside an island of 4 (vendor's advice)"
    knobs = ("tensor_model_parallel_size", "expert_model_parallel_size")

    def prunes(self, columns: Mapping[str, IntArray], predictions: Predictions) -> BoolArray:
        """Return True where either is above 4."""
        wide = np.zeros(predictions.device_used_bytes.shape, dtype=np.bool_)
        for knob in self.knobs:
            wide |= columns.get(knob, np.ones(1, dtype=np.int64)) > ISLAND
        return wide
