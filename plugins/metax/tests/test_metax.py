import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_metax import hooks
from flagcore_metax.discover import peer_memory_problem
from flagcore_metax.hooks import plugin
from flagcore_metax.islands import c500_topology, island_size
from flagcore_testing import PluginConformance
from flagcore_testing.examples import task_on
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import adapter_share, read_matrix

from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.plugins import LoadedPlugins
from tests.checks import given


class TestMetax(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


@pytest.mark.parametrize(("nodes", "devices", "sizes"), [(1, 8, [4, 8]), (2, 8, [4, 8, 16]), (1, 4, [4]), (1, 2, [2])])
def test_a_c500_node_has_islands_of_four(nodes: int, devices: int, sizes: list[int]) -> None:
    topology = given(plugin.flagcore_topology(NodeGroup(chip=chip("C500"), nodes=nodes, devices_per_node=devices)))
    assert [level.devices for level in topology.levels] == sizes


PAIRS = """\
        GPU0    GPU1    GPU2    GPU3
GPU0    X       MX      NODE    NODE
GPU1    MX      X       NODE    NODE
GPU2    NODE    NODE    X       MX
GPU3    NODE    NODE    MX      X
"""


def test_islands_come_from_this_machine_if_its_tool_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matrix").write_text(PAIRS)
    (tmp_path / "mx-smi").write_text(f"#!/bin/sh\nexec cat {tmp_path}/matrix\n")
    (tmp_path / "mx-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    four = plugin.flagcore_topology(NodeGroup(chip=chip("C500"), nodes=1, devices_per_node=4))
    eight = plugin.flagcore_topology(NodeGroup(chip=chip("C500"), nodes=1, devices_per_node=8))
    assert [level.devices for level in given(four).levels] == [2, 4]
    assert [level.devices for level in given(eight).levels] == [4, 8]  # another node than this one


@pytest.mark.parametrize(
    "matrix", ["", PAIRS.replace("MX", "SYS"), PAIRS.replace("NODE    MX      X", "NODE    ??      X")]
)
def test_without_islands_in_the_matrix_the_published_ones_are_used(matrix: str) -> None:
    assert island_size(NodeGroup(chip=chip("C500"), nodes=1, devices_per_node=4), matrix) == 4


def test_network_adapters_come_from_the_user_then_the_machine_then_published(tmp_path: Path) -> None:
    text = saved_outputs(Path(__file__).parent / "smi")["mx-smi-3.txt"]
    matrix = given(read_matrix(text))
    assert adapter_share(matrix, text, tmp_path) is None
    for adapter in range(6):
        rate = tmp_path / f"sys/class/infiniband/mlx5_{adapter}/ports/1/rate"
        rate.parent.mkdir(parents=True)
        rate.write_text("400 Gb/sec (4X NDR)\n")
    here = adapter_share(matrix, text, tmp_path)
    assert here == 2 * 50e9 / 4  # two adapters for the four devices of an island
    shares = []
    for known in (chip("C500"), with_network(chip("C500"), 5e10)):
        topology = given(c500_topology(NodeGroup(chip=known, nodes=2, devices_per_node=8), adapters=here))
        shares.append(topology.levels[-1].bytes_per_second)
    assert shares == [25e9, 5e10]


def test_missing_peer_memory_is_reported_only_with_devices(tmp_path: Path) -> None:
    assert not peer_memory_problem(tmp_path / "another machine")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/mxcd").touch()
    assert "GPUDirect RDMA of MetaX is off" in peer_memory_problem(tmp_path)
    (tmp_path / "fine/dev").mkdir(parents=True)
    (tmp_path / "fine/dev/mxcd").touch()
    (tmp_path / "fine/sys/kernel/mm/memory_peers/mxcd").mkdir(parents=True)
    (tmp_path / "fine/sys/kernel/mm/memory_peers/mxcd/version").touch()
    assert not peer_memory_problem(tmp_path / "fine")


@pytest.mark.parametrize(("nodes", "count"), [(1, 0), (2, 1)])
def test_missing_peer_memory_is_noted_for_tasks_on_several_nodes(
    nodes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flagcore_metax.hooks.peer_memory_problem", lambda: "it is off")
    task = task_on(chip("C500"))
    cluster = Cluster(groups=(replace(task.cluster.groups[0], nodes=nodes),))
    advice = plugin.flagcore_check_task(replace(task, cluster=cluster), None)
    assert (advice.notes if advice else ()).count("it is off") == count


def test_a_c550_node_is_flat() -> None:
    assert plugin.flagcore_topology(NodeGroup(chip=chip("C550"), nodes=1, devices_per_node=8)) is None


@pytest.mark.parametrize(
    ("name", "nodes", "ranks", "payload", "measured", "within"),
    [
        ("C500", 1, 8, 2**26, 1944.65e-6, 0.001),
        ("C500", 1, 8, 2**30, 28874.52e-6, 0.001),
        ("C500", 2, 16, 2**24, 837.04e-6, 0.2),  # two nodes: not in the table
        ("C500", 2, 16, 2**28, 7489.42e-6, 0.2),
        ("C550", 1, 8, 64_000_000, 64e6 / 135e9, 0.01),
    ],
)
def test_published_all_reduce_times_are_predicted(
    name: str, nodes: int, ranks: int, payload: int, measured: float, within: float
) -> None:
    costs = LoadedPlugins.of({"metax": plugin}).collective_costs(
        NodeGroup(chip=chip(name), nodes=nodes, devices_per_node=8), "megatron"
    )
    (found,) = given(costs).seconds("all_reduce", np.array([float(payload)]), np.array([ranks]), np.array([1]))
    assert found == pytest.approx(measured, rel=within)


def test_a_pair_across_the_islands_of_a_c500_is_slower_than_a_pair_inside() -> None:
    costs = LoadedPlugins.of({"metax": plugin}).collective_costs(
        NodeGroup(chip=chip("C500"), nodes=1, devices_per_node=8), "megatron"
    )
    inside, across = given(costs).seconds("all_gather", np.full(2, 1e9), np.full(2, 2), np.array([1, 4]))
    assert across > 1.5 * inside


def chip(name: str) -> Chip:
    return next(chip for chip in plugin.flagcore_chips() if chip.name == name)
