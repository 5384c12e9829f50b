import pytest
from flagcore_hygon.discover import DETECTOR

from flagcore.domain.chip import Device
from flagcore.vendorkit.machine import TorchReport


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
