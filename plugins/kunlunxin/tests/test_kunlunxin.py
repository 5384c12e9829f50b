import pytest
from flagcore_kunlunxin.discover import DETECTOR

from flagcore.domain.chip import Device
from flagcore.vendorkit.machine import TorchReport


@pytest.mark.parametrize(("name", "trusted"), [("GPU", True), ("P800 OAM", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_torch_of_another_vendor_is_not_trusted(name: str, trusted: bool) -> None:
    device = Device(index=0, chip=name, memory_bytes=96 << 30)
    report = TorchReport(version="2.9.0+cu129", attributes=frozenset(), devices=(device,))
    assert DETECTOR.trusts(report) == trusted
