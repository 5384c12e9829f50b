"""Finding devices where the vendor's tool is missing, as tests that its author subclasses. torch is a real process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagcore.domain.chip import Device
from flagcore.testing import fakes
from flagcore.vendorkit import machine
from flagcore.vendorkit.detection import DeviceDetector
from flagcore.vendorkit.machine import TorchReport

TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
def get_device_properties(index):
    return SimpleNamespace(name={name!r}, total_memory={memory_bytes})
{kind} = SimpleNamespace(device_count=lambda: 2, get_device_properties=get_device_properties)
{attributes}
print("a banner of the image {{with braces}}")
"""
FOREIGN = TorchReport(
    version="2.10.0+nobody1.0",
    attributes=frozenset({"nobody"}),
    devices=(Device(index=0, chip="Nobody N-100", memory_bytes=2**36),),
)


class WithoutTool:
    """Set `detector`, and what the vendor's machine has.

    `kind` is torch's name of the devices, `version` and `attributes` what the vendor's torch has, `chip` and
    `memory_bytes` what it tells of a device, `device_file` one that the driver makes, `pci_vendor` the PCI vendor id.
    """

    detector: DeviceDetector
    device_file: str
    chip: str
    memory_bytes: int
    version: str
    kind = "cuda"
    attributes: tuple[str, ...] = ()
    pci_vendor: int

    def devices(self, root: Path, torch: str, node: bool = True) -> tuple[Device, ...]:
        """Return what is found below `root` with a torch of this source, and with a device file or without."""
        modules = root / "modules"
        modules.mkdir()
        (modules / "torch.py").write_text(torch)
        if node:
            (root / self.device_file).parent.mkdir(parents=True)
            (root / self.device_file).touch()
        with fakes.machine(PYTHONPATH=str(modules)):
            found: tuple[Device, ...] = self.detector.devices(root)
            return found

    @property
    def torch(self) -> str:
        """The source of a module that stands for the vendor's torch."""
        more = "\n".join(f"{name} = object()" for name in self.attributes if name != self.kind)
        facts: dict[str, Any] = {"version": self.version, "name": self.chip, "memory_bytes": self.memory_bytes}
        return TORCH.format(kind=self.kind, attributes=more, **facts)

    def test_torch_is_asked_if_a_device_file_is_there(self, tmp_path: Path) -> None:
        found = self.devices(tmp_path, self.torch)
        assert [(each.index, each.chip, each.memory_bytes) for each in found] == [
            (index, self.chip, self.memory_bytes) for index in range(2)
        ]

    def test_torch_is_not_asked_without_a_device_file(self, tmp_path: Path) -> None:
        assert self.devices(tmp_path, self.torch, node=False) == ()

    def test_a_library_that_crashes_when_it_is_loaded_harms_nobody(self, tmp_path: Path) -> None:
        assert self.devices(tmp_path, "import os\nos.abort()\n") == ()

    def test_no_device_without_torch(self, tmp_path: Path) -> None:
        assert self.devices(tmp_path, "raise ImportError\n") == ()

    def test_what_torch_says_of_its_own_devices_is_believed(self) -> None:
        device = Device(index=0, chip=self.chip, memory_bytes=self.memory_bytes)
        own = TorchReport(version=self.version, attributes=frozenset(self.attributes), devices=(device,))
        assert self.detector.torch_devices(own) == (device,)

    def test_what_torch_says_of_another_vendors_devices_is_not(self) -> None:
        assert self.detector.torch_devices(FOREIGN) == ()
        assert self.detector.torch_devices(None) == ()

    def test_devices_on_the_pci_bus_alone_are_none(self, tmp_path: Path) -> None:
        folder = tmp_path / "sys/bus/pci/devices/0000:0e:00.0"
        folder.mkdir(parents=True)
        for name, value in {"vendor": f"{self.pci_vendor:#06x}", "class": "0x030200", "device": "0x4001"}.items():
            (folder / name).write_text(value + "\n")
        assert machine.pci_ids(self.pci_vendor, tmp_path) == ("0x4001",)
        assert machine.pci_ids(0x1234, tmp_path) == ()
        assert self.devices(tmp_path, self.torch, node=False) == ()
