"""What a node's own matrix tells: the rate of its adapters, and which devices are joined."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_cambricon.bridges import x8_topology
from flagcore_cambricon.hooks import plugin as cambricon
from flagcore_nvidia.hooks import plugin as nvidia

from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup
from flagcore.physics.collective_costs import topology_of
from flagcore.vendorkit.matrix import with_own_adapters

H200 = (Path(__file__).parents[2] / "plugins/nvidia/tests/smi/nvidia-smi-5.txt").read_text("utf-8")


def chip(plugin: Any, name: str) -> Chip:
    return next(each for each in plugin.flagcore_chips() if each.name == name)


def adapters(root: Path, gigabits: float) -> Path:
    for number in range(8):
        folder = root / f"sys/class/infiniband/mlx5_{number}/ports/1"
        folder.mkdir(parents=True)
        (folder / "rate").write_text(f"{gigabits:g} Gb/sec (2X NDR)\n")
    return root


@pytest.fixture
def two_nodes() -> NodeGroup:
    return NodeGroup(chip=chip(nvidia, "H200"), nodes=2, devices_per_node=8)


def test_a_machines_own_adapters_are_the_network_of_its_cluster(tmp_path: Path, two_nodes: NodeGroup) -> None:
    own = with_own_adapters(two_nodes, H200, adapters(tmp_path, 200))
    assert own is not None
    assert topology_of(own).levels[-1].bytes_per_second == 25e9
    assert topology_of(two_nodes).levels[-1].bytes_per_second == 50e9


def test_the_users_network_settings_are_kept(tmp_path: Path, two_nodes: NodeGroup) -> None:
    message = NodeGroup(chip=with_network(two_nodes.chip, 1e9), nodes=2, devices_per_node=8)
    assert with_own_adapters(message, H200, adapters(tmp_path, 200)) is None


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (2, 4)])
def test_an_unknown_node_type_uses_the_chips_figure(
    nodes: int, devices: int, tmp_path: Path, two_nodes: NodeGroup
) -> None:
    other = NodeGroup(chip=two_nodes.chip, nodes=nodes, devices_per_node=devices)
    assert with_own_adapters(other, H200, adapters(tmp_path, 200)) is None


def test_adapters_without_a_known_rate_are_no_network(tmp_path: Path, two_nodes: NodeGroup) -> None:
    assert with_own_adapters(two_nodes, H200, tmp_path) is None
    assert with_own_adapters(two_nodes, None, tmp_path) is None


def test_bridge_groups_of_mlus_are_those_that_cnmon_shows() -> None:
    group = NodeGroup(chip=chip(cambricon, "MLU370-X8"), nodes=1, devices_per_node=16)
    names = [f"MLU{n}" for n in range(16)]
    rows = [
        [name, *("X" if a == b else "MLK" if a // 4 == b // 4 else "CPU" for b in range(16)), "0-31"]
        for a, name in enumerate(names)
    ]
    matrix = "\n".join("  ".join(row) for row in [["", *names, "CPU Affinity"], *rows])
    default, shown = x8_topology(group), x8_topology(group, matrix)
    assert default is not None
    assert shown is not None
    assert [level.devices for level in default.levels] == [8, 16]
    assert [level.devices for level in shown.levels] == [4, 16]
