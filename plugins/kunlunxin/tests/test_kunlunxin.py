import pytest
from flagcore_kunlunxin.discover import DETECTOR
from flagcore_kunlunxin.hooks import plugin

from flagcore.domain.chip import Device
from flagcore.vendorkit.machine import TorchReport


@pytest.mark.parametrize("reported", ["P800 OAM", "Kunlunxin P800", "P800"])
def test_names_of_tool_and_torch_are_the_same_chip(reported: str) -> None:
    assert [chip.name for chip in plugin.flagcore_chips() if chip.has_name(reported)] == ["P800"]


@pytest.mark.parametrize(("name", "trusted"), [("GPU", True), ("P800 OAM", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_torch_of_another_vendor_is_not_trusted(name: str, trusted: bool) -> None:
    device = Device(index=0, chip=name, memory_bytes=96 << 30)
    report = TorchReport(version="2.9.0+cu129", attributes=frozenset(), devices=(device,))
    assert DETECTOR.trusts(report) == trusted
