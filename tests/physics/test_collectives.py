"""Collectives from a chip's facts and from measured curves."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.chip import Chip, Fact, Link, Source
from flagcore.domain.cluster import Cluster, Level, NodeGroup, Topology
from flagcore.physics.collective_costs import Collectives, topology_of
from flagcore.physics.collective_curves import KINDS, CollectiveTable, Curve
from tests import tasks

DATASHEET = Source(kind="datasheet", detail="made up for this test")
NODE = Level(name="node", devices=8, bytes_per_second=400e9, latency_seconds=1e-6, efficiency=1.0)
NETWORK = Level(name="network", devices=64, bytes_per_second=50e9, latency_seconds=1e-5, efficiency=1.0)
TOPOLOGY = Topology(levels=(NODE, NETWORK))
LARGE = 1e12
"""A payload beside which every start-up is nothing."""


def fact(value: float) -> Fact:
    return Fact(value=value, source=DATASHEET)


LINK = Link(name="fabric", topology="switch", bytes_per_second=fact(400e9), latency_seconds=1e-6)
CHIP = Chip(name="test-chip", vendor="test", link=LINK, nic_bytes_per_second=fact(50e9))


def group(link: Link = LINK, nodes: int = 1, devices_per_node: int = 8) -> NodeGroup:
    return NodeGroup(chip=replace(CHIP, link=link), nodes=nodes, devices_per_node=devices_per_node)


def seconds(costs: Collectives, kind: str, payload: float, ranks: int, stride: int = 1) -> float:
    return float(costs.seconds(kind, np.array([payload]), np.array([ranks]), np.array([stride]))[0])


def rate(costs: Collectives, kind: str, ranks: int, stride: int = 1) -> float:
    """Bytes of the payload per second, without start-ups."""
    return LARGE / seconds(costs, kind, LARGE, ranks, stride)


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875)]
)
def test_a_ring_sends_its_share_of_the_payload(kind: str, sent: float) -> None:
    assert rate(Collectives(topology=TOPOLOGY), kind, 8) == pytest.approx(400e9 / sent, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_costs_nothing(kind: str) -> None:
    assert seconds(Collectives(topology=TOPOLOGY), kind, 1e9, 1, 8) == 0
    assert seconds(Collectives(topology=Topology(levels=())), kind, 1e9, 1) == 0


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_each_device_of_a_node_uses_its_own_port(kind: str) -> None:
    costs = Collectives(topology=TOPOLOGY)
    one, four, eight = (rate(costs, kind, 8 * per_node, 8 // per_node) for per_node in (1, 4, 8))
    assert one == pytest.approx(50e9 * 8 / 7, rel=0.01)
    assert four == pytest.approx(4 * 50e9 * 32 / 31, rel=0.01)
    assert eight == pytest.approx(400e9 * 64 / 63, rel=0.01)


def test_an_all_reduce_between_nodes_is_a_ring_or_uses_switch_reduction() -> None:
    slow = replace(NETWORK, bytes_per_second=10e9)
    ring = rate(Collectives(topology=Topology(levels=(NODE, slow))), "all_reduce", 16)
    assert ring == pytest.approx(8 * 10e9 * 16 / 30, rel=0.01)
    sums = rate(Collectives(topology=Topology(levels=(replace(NODE, reduces=True), slow))), "all_reduce", 16)
    assert sums == pytest.approx(8 * 10e9, rel=0.01)  # half of it goes out and half comes back, over eight ports
    many = rate(Collectives(topology=Topology(levels=(replace(NODE, reduces=True), slow))), "all_reduce", 64)
    assert many == pytest.approx(8 * 10e9 / 1.75, rel=0.01)


def test_an_all_to_all_is_as_slow_as_its_traffic_between_nodes() -> None:
    costs = Collectives(topology=TOPOLOGY)
    assert rate(costs, "all_to_all", 16) == pytest.approx(50e9 / (8 / 16), rel=0.01)
    assert rate(costs, "all_to_all", 64) == pytest.approx(50e9 / (56 / 64), rel=0.01)
    assert rate(costs, "all_to_all", 8, 8) == pytest.approx(50e9 / (7 / 8), rel=0.01)


def test_a_message_pays_the_level_that_it_crosses() -> None:
    costs = Collectives(topology=TOPOLOGY)
    assert rate(costs, "send", 2, 4) == pytest.approx(400e9, rel=0.01)
    assert rate(costs, "send", 2, 8) == pytest.approx(50e9, rel=0.01)
    assert rate(costs, "send", 4, 4) == pytest.approx(50e9, rel=0.01)


def test_small_all_reduces_over_many_nodes_take_a_tree_and_gathering_takes_a_ring() -> None:
    costs = Collectives(topology=Topology(levels=(NODE, replace(NETWORK, devices=8 * 1024))))
    few, many = (seconds(costs, "all_reduce", 8.0, nodes, 8) for nodes in (32, 1024))
    assert many < 2.5 * few
    few, many = (seconds(costs, "all_gather", 8.0, nodes, 8) for nodes in (32, 1024))
    assert many > 15 * few


def test_medium_messages_exceed_latency_and_bandwidth_but_not_by_half() -> None:
    costs = Collectives(topology=TOPOLOGY)
    sizes = 2.0 ** np.arange(10, 34)
    found = costs.seconds("all_gather", sizes, np.full(24, 8), np.ones(24, dtype=np.int64))
    line = found[0] + 0.875 * sizes / 400e9
    assert (found >= 0.99 * line).all()
    assert (found <= 1.65 * line).all()
    assert (found / line).max() > 1.4


def test_a_link_may_join_several_nodes_or_an_island_of_one() -> None:
    rack = replace(LINK, domain_size=72)
    assert [level.devices for level in topology_of(group(rack, nodes=32, devices_per_node=4)).levels] == [72, 128]
    assert [level.devices for level in topology_of(group(rack, nodes=2, devices_per_node=4)).levels] == [8]
    assert [level.devices for level in topology_of(group(replace(LINK, domain_size=4))).levels] == [4, 8]


def test_times_inside_the_link_need_no_network() -> None:
    chip = replace(CHIP, nic_bytes_per_second=None)
    costs = Collectives(topology=topology_of(NodeGroup(chip=chip, nodes=2, devices_per_node=8)))
    for kind in KINDS:
        assert seconds(costs, kind, 1e6, 8) > 0
        assert np.isnan(seconds(costs, kind, 1e6, 16))
        assert np.isnan(seconds(costs, kind, 1e6, 2, 8))


def test_a_pair_has_one_link_of_a_full_mesh_and_all_of_a_switch() -> None:
    switch, mesh, ring = (
        Collectives(topology=topology_of(group(replace(LINK, topology=name)))) for name in ("switch", "mesh", "ring")
    )
    assert rate(mesh, "send", 2) == pytest.approx(rate(switch, "send", 2) / 7, rel=0.01)
    assert rate(mesh, "all_gather", 4) == pytest.approx(rate(switch, "all_gather", 4) * 3 / 7, rel=0.01)
    assert rate(mesh, "all_gather", 8) == pytest.approx(rate(switch, "all_gather", 8), rel=0.01)
    assert rate(ring, "send", 2) == pytest.approx(rate(switch, "send", 2) / 2, rel=0.01)
    assert rate(ring, "all_gather", 8) == pytest.approx(rate(switch, "all_gather", 8), rel=0.01)


def test_contention_is_higher_over_pcie_and_highest_through_the_host() -> None:
    peer, staged = (
        Collectives(topology=topology_of(group(replace(LINK, topology="pcie", peer_access=access))))
        for access in (True, False)
    )
    bus = [[rate(costs, "all_gather", n) * (n - 1) / n for n in (2, 4, 8)] for costs in (peer, staged)]
    assert bus[0][0] == pytest.approx(bus[1][0])
    assert bus[0][2] / bus[0][0] == pytest.approx(22.1 / 34.7, rel=0.05)
    assert bus[1][2] / bus[1][0] == pytest.approx(1.6 / 18.7, rel=0.1)


def test_a_collective_slows_compute_by_the_share_of_its_levels() -> None:
    levels = topology_of(group(nodes=8))
    share = Collectives(topology=levels).compute_share(np.array([1, 8, 8, 64]), np.array([1, 1, 8, 1]))
    assert share.tolist() == [0.0, 0.15, 0.02, 0.15]
    beside = Collectives(topology=topology_of(group(replace(LINK, copy_engine=True))))
    assert beside.compute_share(np.array([8]), np.array([1])).tolist() == [0.0]
    on_the_processor = Collectives(topology=topology_of(group(replace(LINK, topology="shared-memory"))))
    assert on_the_processor.compute_share(np.array([2]), np.array([1])).tolist() == [1.0]


SIZES = (512.0, 2.0**20, 2.0**24, 2.0**29)
GATHER = {2: (5e-6, 8e-6, 45e-6, 1.1e-3), 4: (7e-6, 10e-6, 52e-6, 1.3e-3), 8: (10e-6, 15e-6, 60e-6, 1.45e-3)}
TABLE = CollectiveTable(
    curves=tuple(
        Curve(kind="all_gather", ranks=ranks, payload_bytes=SIZES, seconds=times) for ranks, times in GATHER.items()
    ),
    source="made up for this test",
)
MEASURED = Collectives(topology=TOPOLOGY, table=TABLE)


@pytest.mark.parametrize("ranks", GATHER)
def test_measured_times_are_predicted(ranks: int) -> None:
    found = [seconds(MEASURED, "all_gather", size, ranks) for size in SIZES]
    assert found == pytest.approx(GATHER[ranks], rel=1e-9)


def test_times_grow_with_payload_and_ranks_between_and_beyond_measurements() -> None:
    sizes = np.geomspace(1.0, 1e12, 500)
    before = np.zeros(500)
    for ranks in range(2, 9):
        found = MEASURED.seconds("all_gather", sizes, np.full(500, ranks), np.ones(500, dtype=np.int64))
        assert (np.diff(found) >= 0).all()
        assert (found >= before).all()
        before = found
    last, beyond = (seconds(MEASURED, "all_gather", size, 8) for size in (2.0**29, 2.0**32))
    assert beyond / last == pytest.approx(8, rel=0.02)


def test_unmeasured_collectives_are_derived_from_related_ones_or_the_link() -> None:
    plain = Collectives(topology=TOPOLOGY)
    assert seconds(MEASURED, "reduce_scatter", 1e8, 8) == seconds(MEASURED, "all_gather", 1e8, 8)
    assert seconds(MEASURED, "all_reduce", 1e8, 8) == pytest.approx(2 * seconds(MEASURED, "all_gather", 1e8, 8))
    for kind in ("all_to_all", "send"):
        assert seconds(MEASURED, kind, 1e8, 8) == seconds(plain, kind, 1e8, 8)
    of_reduction = replace(TABLE, curves=tuple(replace(curve, kind="all_reduce") for curve in TABLE.curves))
    reduced = Collectives(topology=TOPOLOGY, table=of_reduction)
    assert seconds(reduced, "all_gather", 1e8, 8) == pytest.approx(seconds(reduced, "all_reduce", 1e8, 8) / 2)


def test_a_curve_of_large_sizes_has_a_small_latency() -> None:
    curve = Curve(kind="all_gather", ranks=2, payload_bytes=(2.0**23, 2.0**25), seconds=(600e-6, 1800e-6))
    costs = Collectives(topology=TOPOLOGY, table=replace(TABLE, curves=(curve,)))
    assert seconds(costs, "all_gather", 2.0**23, 2) == pytest.approx(600e-6)
    assert seconds(costs, "all_gather", 64.0, 2) < 60e-6


def test_ranks_beyond_the_measured_ones_pay_for_steps_and_bytes() -> None:
    rack = Topology(levels=(replace(NODE, devices=72),))
    few = tuple(curve for curve in TABLE.curves if curve.ranks < 8)
    costs = Collectives(topology=rack, table=replace(TABLE, curves=few))
    small, large = (
        seconds(costs, "all_gather", size, 64) / seconds(costs, "all_gather", size, 4) for size in (8.0, 1e11)
    )
    assert 2 < small < 10
    assert large == pytest.approx((63 / 64) / (3 / 4), rel=0.02)


def test_a_group_over_several_nodes_pays_the_curve_inside_and_the_network_outside() -> None:
    inside = seconds(MEASURED, "all_gather", 2.0**29, 8)
    assert seconds(MEASURED, "all_gather", 2.0**29, 16) > inside * 15 / 14
    slow = Collectives(topology=Topology(levels=(NODE, replace(NETWORK, bytes_per_second=1e9))), table=TABLE)
    assert rate(slow, "all_gather", 16) == pytest.approx(8e9 * 16 / 15, rel=0.01)
    assert seconds(MEASURED, "all_gather", 8.0, 16) > GATHER[8][0] + NETWORK.latency_seconds


def test_a_curve_over_two_islands_includes_the_slow_link_between_them() -> None:
    island = replace(NODE, name="island", devices=4)
    between = replace(NODE, name="between", bytes_per_second=16e9)
    of_eight = replace(TABLE, curves=TABLE.curves[2:], level="between")
    costs = Collectives(topology=Topology(levels=(island, between)), table=of_eight)
    assert seconds(costs, "all_gather", SIZES[1], 8) == pytest.approx(GATHER[8][1])
    assert rate(costs, "all_gather", 2, 4) == pytest.approx(2 * 16e9, rel=0.01)


def test_columns_of_any_shape_are_answered_row_by_row() -> None:
    payload = np.array([1e3, 1e6, 1e9, 1e6])
    ranks, stride = np.array([2, 16, 64, 1]), np.array([8, 1, 1, 4])
    for costs in (MEASURED, Collectives(topology=TOPOLOGY)):
        for kind in KINDS:
            all_rows = costs.seconds(kind, payload, ranks, stride)
            assert all_rows.tolist() == [
                seconds(costs, kind, size, int(n), int(s)) for size, n, s in zip(payload, ranks, stride, strict=True)
            ]


@pytest.mark.parametrize(("usual", "linked"), [(8, 4), (4, 8)])
def test_a_link_inside_nodes_does_not_connect_smaller_nodes(usual: int, linked: int) -> None:
    chip = replace(tasks.CHIP, link=replace(LINK, domain_size=8), devices_per_node=usual)
    group = NodeGroup(chip=chip, nodes=2, devices_per_node=4)
    assert Cluster(groups=(group,)).linked_devices == linked
    assert topology_of(group).levels[0].devices == linked
