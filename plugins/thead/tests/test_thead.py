"""Checks of ppu-smi transcripts (tests/smi), in addition to the kit's checks."""

from pathlib import Path

import pytest
from flagcore_testing import PluginConformance, fakes
from flagcore_testing.package import saved_outputs
from flagcore_thead import discover, hooks
from flagcore_vendorkit.rows import devices_per_adapter, read_matrix


class TestThead(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_processes_are_listed_by_device() -> None:
    with fakes.machine({"ppu-smi": fakes.prints(TEXTS["ppu-smi-1.txt"])}):
        uses = discover.DETECTOR.uses_now()
    assert uses[0].processes == ("525179 VLLM::Worker_TP0 (65.2 GiB)", "525201 python3 (0.0 GiB)")
    assert not uses[1].processes


def test_an_exclusive_device_in_use_is_blocked() -> None:
    with fakes.machine({"ppu-smi": fakes.prints(TEXTS["ppu-smi-1.txt"].replace("  Default  |", "E. Process |"))}):
        uses = discover.DETECTOR.uses_now()
    assert [bool(uses[index].blocked) for index in (0, 1)] == [True, False]


def test_uuids_and_links_are_read() -> None:
    assert list(discover.uuids(TEXTS["ppu-smi-4.txt"])) == [0, 1]
    matrix = read_matrix(TEXTS["ppu-smi-3.txt"])
    assert matrix is not None
    assert matrix.links[0, 1] == "ICN2"
    assert devices_per_adapter(matrix) == {"NIC0": 2, "NIC1": 2}
