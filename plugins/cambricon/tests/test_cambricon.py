import numpy as np
import pytest
from flagcore_cambricon.hooks import plugin

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup


def test_the_reason_that_an_engine_does_not_run_on_a_chip_is_shown() -> None:
    reasons = {
        chip.name: support.reason
        for chip in plugin.flagcore_chips()
        if (support := plugin.flagcore_engine_support(chip, "vllm", None, "serve")) is not None
    }
    assert "above the MLU370" in reasons["MLU370-X8"]
    assert "above the MLU370" not in reasons["MLU590-M9"]


@pytest.mark.parametrize(
    ("nodes", "devices", "sizes"), [(1, 8, None), (1, 16, [8, 16]), (2, 16, None), (2, 8, None), (1, 2, None)]
)
def test_an_mlu370_x8_node_has_two_bridge_groups(nodes: int, devices: int, sizes: list[int] | None) -> None:
    topology = plugin.flagcore_topology(NodeGroup(chip=chip("MLU370-X8"), nodes=nodes, devices_per_node=devices))
    assert (None if topology is None else [level.devices for level in topology.levels]) == sizes


def test_between_bridge_groups_a_device_has_its_share_of_pcie_and_between_nodes_of_the_users_network() -> None:
    known = with_network(chip("MLU370-X8"), 1.25e10)
    topology = plugin.flagcore_topology(NodeGroup(chip=known, nodes=2, devices_per_node=16))
    assert topology is not None
    assert [level.bytes_per_second for level in topology.levels] == [5e10, 4e9, 1.25e10]


def chip(name: str) -> Chip:
    return next(chip for chip in plugin.flagcore_chips() if chip.name == name)


def test_the_published_times_of_the_mlu590_m9_predict_its_kernels() -> None:
    (chip,) = (each for each in plugin.flagcore_chips() if each.name == "MLU590-M9")
    costs = plugin.flagcore_kernel_costs(chip, "train")
    assert costs is not None
    size = np.array([8192.0])
    seconds = costs.gemm_seconds(size, size, size, "bf16")
    assert 2 * 8192**3 / seconds == pytest.approx(221e12, rel=0.05)
    sizes = {"batch": 4.0, "heads": 16.0, "groups": 16.0, "queries": 4096.0, "keys": 4096.0, "head_dim": 128.0}
    shape = AttentionShape(**{name: np.array([value]) for name, value in sizes.items()})
    assert costs.attention_seconds(shape, "bf16") == pytest.approx(2.88e-3, rel=0.05)


@pytest.mark.parametrize(("engine", "knobs"), [("megatron", 2), ("vllm", 3), ("sglang", 0)])
def test_knobs_of_the_vendors_software_set_variables(engine: str, knobs: int) -> None:
    found = plugin.flagcore_knobs(plugin.flagcore_chips()[0], engine, None) or ()
    assert len(found) == knobs
    assert all(effect.environment for knob in found for effect in knob.effects.values())
