"""Costs and knobs of Cambricon's chips, and the output of cnmon on real machines (tests/smi)."""

from pathlib import Path

import numpy as np
import pytest
from flagcore_cambricon import discover, hooks
from flagcore_cambricon.hooks import plugin
from flagcore_testing import PluginConformance
from flagcore_testing.package import saved_outputs

from flagcore.contracts import AttentionShape
from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import NodeGroup
from tests.checks import given


class TestCambricon(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


def test_the_reason_that_an_engine_does_not_run_on_a_chip_is_shown() -> None:
    reasons = {
        chip.name: support.reason
        for chip in plugin.flagcore_chips("")
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
    topology = given(plugin.flagcore_topology(NodeGroup(chip=known, nodes=2, devices_per_node=16)))
    assert [level.bytes_per_second for level in topology.levels] == [5e10, 4e9, 1.25e10]


def chip(name: str) -> Chip:
    return next(chip for chip in plugin.flagcore_chips("") if chip.name == name)


def test_the_published_times_of_the_mlu590_m9_predict_its_kernels() -> None:
    (chip,) = (each for each in plugin.flagcore_chips("") if each.name == "MLU590-M9")
    costs = given(plugin.flagcore_kernel_costs(chip, "train"))
    size = np.array([8192.0])
    assert 2 * 8192**3 / costs.gemm_seconds(size, size, size, "bf16") == pytest.approx(221e12, rel=0.05)
    sizes = {"batch": 4.0, "heads": 16.0, "groups": 16.0, "queries": 4096.0, "keys": 4096.0, "head_dim": 128.0}
    shape = AttentionShape(**{name: np.array([value]) for name, value in sizes.items()})
    assert costs.attention_seconds(shape, "bf16") == pytest.approx(2.88e-3, rel=0.05)


@pytest.mark.parametrize(("engine", "knobs"), [("megatron", 2), ("vllm", 3), ("sglang", 0)])
def test_knobs_of_the_vendors_software_set_variables(engine: str, knobs: int) -> None:
    found = plugin.flagcore_knobs(plugin.flagcore_chips("")[0], engine, None) or ()
    assert len([knob for knob in found if knob.name.startswith("mlu_")]) == knobs
    assert all(effect.environment for knob in found for effect in knob.effects.values())


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_a_version_without_a_letter_and_power_with_cents_are_read() -> None:
    (row,) = discover.read(TEXTS["cnmon-6.txt"]).rows
    assert (row.device.chip, row.device.driver) == ("MLU220-M2", "4.6.9")
    assert (row.reading["power_watts"], row.reading["power_limit_watts"]) == (3.7, 8.25)


TABLE = TEXTS["cnmon-8.txt"]


def test_a_card_with_unreadable_memory_is_reported() -> None:
    listing = discover.read(TABLE.replace("98304 MiB", "xxxxx MiB"))
    assert [row.device.index for row in listing.rows] == [1]
    assert any("xxxxx MiB" in line for line in listing.left_out)
    assert discover.read(TABLE.replace("33654 MiB/ 98304 MiB", "N/A")).rows == listing.rows, "power is not memory"


def test_json_of_another_form_has_no_devices() -> None:
    assert discover.read('{"CnmonInfo": 3}') == discover.read("{") == discover.read("")
