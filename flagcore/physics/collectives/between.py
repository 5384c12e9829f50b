"""The costs of messages between node groups of different chips."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagcore.contracts import KernelCosts
from flagcore.domain.cluster import Level, Topology
from flagcore.physics.collectives.costs import Collectives


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
