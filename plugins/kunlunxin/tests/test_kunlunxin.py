"""Checks of xpu-smi transcripts (tests/smi), in addition to the kit's checks."""

from pathlib import Path

import pytest
from flagcore_kunlunxin import discover, hooks
from flagcore_kunlunxin.discover import DETECTOR
from flagcore_testing import PluginConformance, fakes
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.machine import TorchReport
from flagcore_vendorkit.rows import islands, read_matrix

from flagcore.domain.chip import Device


class TestKunlunxin(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")

INTEL = """
|            Intel XPU-SMI v2.0    Driver: 96E1802BAF7F7118043A89B    Level Zero: 1.32.0             |
|   0  P800 OAM                N/A  | 0000:03:00.0 N/A           |               Disabled |
| N/A               N/A  45W / 190W | 3642MiB / 16288MiB         |      N/A       Default |
"""


def test_processes_are_listed_by_device() -> None:
    with fakes.machine({"xpu-smi": fakes.prints(TEXTS["xpu-smi-1.txt"])}):
        assert discover.DETECTOR.uses_now()[1].processes == ("30413 python3 (70.0 GiB)",)
    assert discover.processes(TEXTS["xpu-smi-2.txt"]) == {}


def test_links_join_each_half_of_a_server() -> None:
    matrix = read_matrix(TEXTS["xpu-smi-3.txt"])
    assert matrix is not None
    assert islands(matrix, "XL") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_another_vendors_xpu_smi_is_distinguished() -> None:
    assert discover.read(INTEL).rows == ()


@pytest.mark.parametrize(("name", "trusted"), [("GPU", True), ("P800 OAM", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_torch_of_another_vendor_is_not_trusted(name: str, trusted: bool) -> None:
    device = Device(index=0, chip=name, memory_bytes=96 << 30)
    report = TorchReport(version="2.9.0+cu129", attributes=frozenset(), devices=(device,))
    assert DETECTOR.trusts(report) == trusted
