import pytest
from flagcore_hygon.discover import DETECTOR
from flagcore_hygon.hooks import plugin

from flagcore.domain.chip import Device
from flagcore.vendorkit.machine import TorchReport


@pytest.mark.parametrize(
    ("reported", "name"),
    [("BW", "BW1000"), ("BW1000 64G", "BW1000"), ("BW200, UBB BW1000", "BW1000"), ("K100_AI", "K100-AI")],
)
def test_names_of_tool_and_torch_are_the_same_chip(reported: str, name: str) -> None:
    assert [chip.name for chip in plugin.flagcore_chips() if chip.has_name(reported)] == [name]


@pytest.mark.parametrize(
    ("version", "name", "trusted"),
    [
        ("2.9.0+das.opt1.dtk2604", "BW", True),
        ("2.9.0", "K100_AI", True),
        ("2.9.1+rocm7.2", "AMD Instinct MI300X", False),
        ("2.11.0+cu130", "NVIDIA H200", False),
    ],
)
def test_torch_of_another_vendor_is_not_trusted(version: str, name: str, trusted: bool) -> None:
    device = Device(index=0, chip=name, memory_bytes=64 << 30)
    report = TorchReport(version=version, attributes=frozenset(), devices=(device,))
    assert DETECTOR.trusts(report) == trusted
