"""Checks of `npu-smi info` transcripts (tests/smi), in addition to the kit's checks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_ascend import discover, hooks
from flagcore_ascend.hooks import plugin
from flagcore_testing import PluginConformance
from flagcore_testing.examples import group_of
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import islands, read_matrix

from flagcore.contracts import communicator_bytes
from tests.checks import given


class TestAscend(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_each_die_of_a_module_is_a_device_and_the_first_has_the_power() -> None:
    rows = discover.read(TEXTS["npu-smi-4.txt"]).rows
    assert [row.device.index for row in rows if "power_watts" in row.reading] == list(range(0, 16, 2))
    assert rows[1].reading["memory_used_bytes"] == 2879 * 2**20


def test_devices_of_a_card_with_different_memory_are_exact_and_numbered_from_zero() -> None:
    rows = discover.read(TEXTS["npu-smi-5.txt"]).rows
    assert [(row.device.index, row.device.memory_bytes) for row in rows] == [(0, 44280 << 20), (1, 43693 << 20)]
    assert rows[0].reading == {"memory_used_bytes": 1533 << 20, "temperature_celsius": 45, "utilization_share": 0}


def test_a_device_in_critical_health_is_left_out_and_the_others_keep_their_index() -> None:
    listing = discover.read(TEXTS["npu-smi-2.txt"])
    assert [row.device.index for row in listing.rows] == [0, 1, 3, 4, 5, 6, 7]
    assert ["Critical" in line for line in listing.left_out] == [True]
    assert len(discover.read(TEXTS["npu-smi-2.txt"].replace("Critical", "Warning ")).rows) == 8


def test_processes_are_listed_by_device() -> None:
    assert discover.processes(TEXTS["npu-smi-1.txt"]) == {5: ("41753 python3 (53.6 GiB)",)}
    assert discover.processes(TEXTS["npu-smi-4.txt"]) == {15: ("632301 python3 (28.3 GiB)",)}
    assert discover.processes(TEXTS["npu-smi-2.txt"]) == {}


def test_a_device_without_memory_or_with_another_tools_title_is_not_listed() -> None:
    table = TEXTS["npu-smi-2.txt"]
    assert len(discover.read(table.replace("/ 32768", "/ 0    ", 1)).left_out) == 2
    assert discover.read(table.replace("npu-smi ", "npu-top ")).rows == ()


def test_the_links_of_a_server_are_a_full_mesh() -> None:
    matrix = given(read_matrix(TEXTS["npu-smi-6.txt"]))
    assert islands(matrix, "HCCS") == (tuple(range(8)),)


def test_each_communicator_of_hccl_takes_its_buffers() -> None:
    model = given(plugin.flagcore_memory_model(group_of(plugin.flagcore_chips("")[0]), "megatron", "train"))
    assert communicator_bytes(model) == 400 * 2**20


@pytest.mark.parametrize(("budget", "driver"), [(None, 0), (60 * 10**9, 0), (2**36, hooks.DRIVER_BYTES)])
def test_the_memory_of_the_driver_counts_once(budget: int | None, driver: int) -> None:
    chip = next(each for each in plugin.flagcore_chips("") if each.name == "910B3")
    model = given(plugin.flagcore_memory_model(replace(group_of(chip), memory_bytes=budget), "vllm", "serve"))
    assert float(model.device_used_bytes(np.zeros(1))[0]) == driver + hooks.CONTEXT_BYTES
