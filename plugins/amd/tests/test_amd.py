"""What rocm-smi and amd-smi print (tests/smi), in addition to the kit's checks."""

import json
from pathlib import Path

import pytest
from flagcore_amd import discover, hooks
from flagcore_testing import PluginConformance, fakes
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import islands, read_matrix


class TestAmd(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_the_second_die_of_a_module_has_no_power() -> None:
    rows = discover.read(TEXTS["rocm-smi-2.json"]).rows
    assert ["power_watts" in row.reading for row in rows] == [True, False, True, False]


def test_amd_smi_of_older_releases_prints_a_list() -> None:
    older = json.dumps(json.loads(TEXTS["amd-smi-1.json"])["gpu_data"])
    assert discover.read(older) == discover.read(TEXTS["amd-smi-1.json"])
    assert discover.read(older.replace("294896", '"N/A"', 1)).left_out != ()


def test_amd_smi_may_print_a_single_device_without_a_list() -> None:
    first = json.loads(TEXTS["amd-smi-1.json"])["gpu_data"][0]
    assert discover.read(json.dumps(first)).rows == discover.read(TEXTS["amd-smi-1.json"]).rows[:1]


def test_links_are_read_from_the_matrix_of_link_types() -> None:
    with fakes.machine({"rocm-smi": fakes.prints(TEXTS["rocm-smi-3.txt"])}):
        matrix = read_matrix(discover.DETECTOR.matrix())
    assert matrix is not None
    assert islands(matrix, "XGMI") == (tuple(range(8)),)
