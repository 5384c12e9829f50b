import numpy as np
import pytest
from flagcore_nvidia import smi
from flagcore_nvidia.hooks import plugin

from flagcore.contracts import CollectiveCosts
from flagcore.domain.cluster import NodeGroup
from flagcore.plugins import LoadedPlugins


def test_memory_that_the_driver_does_not_report_stays_unknown() -> None:
    (row,) = smi.read("0, NVIDIA GB10, [N/A], 580.95, GPU-cccc3333, 0x2E1210DE, [N/A]\n").rows
    assert row.device.memory_bytes is None


def test_collective_buffers_are_counted_for_more_than_one_device() -> None:
    chip = plugin.flagcore_chips()[0]
    groups = (NodeGroup(chip=chip, nodes=1, devices_per_node=devices) for devices in (1, 2, 8))
    models = [plugin.flagcore_memory_model(group, "megatron") for group in groups]
    alone, pair, eight = (model.context_bytes for model in models if model is not None)
    assert (pair - alone, eight - alone) == (pytest.approx(342 * 2**20), pytest.approx(392 * 2**20))


def collectives(chip: str, nodes: int = 1, devices_per_node: int = 8) -> CollectiveCosts:
    loaded = LoadedPlugins.of({"nvidia": plugin})
    known = loaded.find_chip(chip)
    assert known is not None
    costs = loaded.collective_costs(NodeGroup(chip=known, nodes=nodes, devices_per_node=devices_per_node), "megatron")
    assert costs is not None
    return costs


def seconds(costs: CollectiveCosts, kind: str, payload: float, ranks: int) -> float:
    return float(costs.seconds(kind, np.array([payload]), np.array([ranks]), np.array([1]))[0])


@pytest.mark.parametrize(("mebibytes", "bus"), [(4, 135.58), (16, 244.4), (64, 359.49), (256, 402.56), (1024, 461.28)])
def test_an_all_reduce_on_another_h100_node_is_within_10_percent(mebibytes: int, bus: float) -> None:
    # a published report of a DGX H100 (all_reduce_perf), which the table is not made from
    payload = mebibytes * 2**20
    assert seconds(collectives("H100-SXM"), "all_reduce", payload, 8) == pytest.approx(
        1.75 * payload / (bus * 1e9), rel=0.1
    )


@pytest.mark.parametrize(
    ("chip", "nodes", "kind", "ranks", "payload", "measured"),
    [
        ("H100-SXM", 2, "all_reduce", 16, 2**34, 2**34 / 250e9),  # NVIDIA/nccl-tests issue 309
        ("H100-SXM", 16, "all_reduce", 128, 512, 67e-6),  # NVIDIA/nccl issue 1469
        ("H100-SXM", 32, "all_reduce", 256, 2**31, 2 * 2**31 / 340e9),  # NVIDIA/nccl issue 1218
        ("H200", 248, "all_reduce", 1984, 2**29, 2 * 2**29 / 350e9),  # NVIDIA/nccl-tests issue 283
        ("B200", 2, "all_reduce", 16, 8, 55e-6),  # dstackai/dstack pull request 3961
    ],
)
def test_collectives_over_several_nodes_are_within_20_percent(
    chip: str, nodes: int, kind: str, ranks: int, payload: float, measured: float
) -> None:
    assert seconds(collectives(chip, nodes), kind, payload, ranks) == pytest.approx(measured, rel=0.2)


def test_a_rack_of_gb300_is_one_domain_and_two_are_joined_by_the_network() -> None:
    costs = collectives("GB300", nodes=32, devices_per_node=4)
    assert seconds(costs, "all_reduce", 2**34, 64) == pytest.approx(36.35e-3, rel=0.01)
    assert seconds(costs, "all_gather", 2**30, 64) < 2.5e-3
    assert seconds(costs, "all_to_all", 2**30, 128) > 2.5 * seconds(costs, "all_to_all", 2**30, 64)
    assert costs.compute_share(np.array([64, 2]), np.array([1, 72])).tolist() == [0.15, 0.02]


def test_chips_with_equal_links_share_times() -> None:
    same = {"B300": "B200", "GB300": "GB200", "H20": "H200", "A100-40GB": "A100-80GB", "L20": "L40S"}
    for chip, other in same.items():
        assert seconds(collectives(chip), "all_gather", 2**26, 4) == seconds(collectives(other), "all_gather", 2**26, 4)
