"""Collectives from a chip's facts."""

from __future__ import annotations

import numpy as np
import pytest

from flagcore.domain.chip import Chip, Fact, Link, Source
from flagcore.domain.cluster import Level, NodeGroup, Topology
from flagcore.physics.collectives import AlphaBeta, topology_of

DATASHEET = Source(kind="datasheet", detail="made up for this test")


def fact(value: float) -> Fact:
    return Fact(value=value, source=DATASHEET)


LINK = Link(name="fabric", topology="switch", bytes_per_second=fact(400e9), latency_seconds=1e-6)
CHIP = Chip(
    name="test-chip",
    vendor="test",
    memory_bytes=fact(80e9),
    memory_bandwidth_bytes_per_second=fact(3e12),
    dense_flops_per_second={"bf16": fact(900e12)},
    link=LINK,
    nic_bytes_per_second=fact(50e9),
)
TOPOLOGY = Topology(
    levels=(
        Level(name="node", devices=8, bytes_per_second=400e9, latency_seconds=1e-6),
        Level(name="network", devices=64, bytes_per_second=50e9, latency_seconds=1e-5),
    )
)


def one(value: float) -> np.ndarray:
    return np.array([value])


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875)]
)
def test_a_ring_sends_its_share_of_the_payload(kind: str, sent: float) -> None:
    time = AlphaBeta(topology=TOPOLOGY, share=1.0).seconds(kind, one(1e9), np.array([8]), np.array([1]))
    assert time[0] == pytest.approx(sent * 1e9 / 400e9, rel=0.01)


def test_a_group_of_one_costs_nothing() -> None:
    time = AlphaBeta(topology=TOPOLOGY).seconds("all_reduce", one(1e9), np.array([1]), np.array([8]))
    assert time[0] == 0


def test_a_group_is_as_slow_as_the_level_that_holds_its_span() -> None:
    costs = AlphaBeta(topology=TOPOLOGY, share=1.0)
    near, far = costs.seconds("send", one(1e9), np.array([2, 2]), np.array([4, 8]))
    assert near == pytest.approx(1e9 / 400e9, rel=0.01)
    assert far == pytest.approx(1e9 / 50e9, rel=0.01)


def test_a_topology_is_made_from_link_and_network() -> None:
    found = topology_of(NodeGroup(chip=CHIP, nodes=2, devices_per_node=8))
    assert found is not None
    assert [(level.devices, level.bytes_per_second) for level in found.levels] == [(8, 400e9), (16, 50e9)]


def test_several_nodes_without_a_known_network_have_no_topology() -> None:
    chip = Chip(name="island", vendor="test", link=LINK)
    assert topology_of(NodeGroup(chip=chip, nodes=2, devices_per_node=8)) is None
    alone = topology_of(NodeGroup(chip=chip, nodes=1, devices_per_node=8))
    assert alone is not None
    assert len(alone.levels) == 1
