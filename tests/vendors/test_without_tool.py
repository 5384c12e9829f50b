"""Which devices each vendor's plugin finds where its tool is missing. torch is a real process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from flagcore_testing import fakes

from flagcore.domain.chip import Device
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


@dataclass(frozen=True)
class Vendor:
    """A vendor's machine: the device file, what torch is and reports of a device, and the PCI vendor id."""

    name: str
    device_file: str
    pci_vendor: int
    chip: str
    memory_bytes: int
    version: str
    kind: str = "cuda"
    attributes: tuple[str, ...] = ()

    @property
    def detector(self) -> DeviceDetector:
        found: DeviceDetector = import_module(f"flagcore_{self.name}.discover").DETECTOR
        return found

    @property
    def torch(self) -> str:
        """The source of a module that stands for the vendor's torch."""
        extra = "\n".join(f"{name} = object()" for name in self.attributes if name != self.kind)
        facts = {"version": self.version, "name": self.chip, "memory_bytes": self.memory_bytes}
        return TORCH.format(kind=self.kind, attributes=extra, **facts)

    def devices(self, root: Path, torch: str, node: bool = True, **variables: str) -> tuple[Device, ...]:
        """Return what is found below `root` with a torch of this source, and with a device file or without, for
        processes with more `variables`.
        """
        modules = root / "modules"
        modules.mkdir()
        (modules / "torch.py").write_text(torch)
        if node:
            (root / self.device_file).parent.mkdir(parents=True)
            (root / self.device_file).touch()
        with fakes.machine(PYTHONPATH=str(modules)):
            return self.detector.devices(root, {**os.environ, **variables})


VENDORS = (
    Vendor("nvidia", "dev/nvidia0", 0x10DE, "NVIDIA H200", 143771 << 20, "2.10.0+cu129"),
    Vendor("metax", "dev/mxcd", 0x9999, "MetaX C500", 64 << 30, "2.10.0+metax3.8.1.0"),
    Vendor("iluvatar", "dev/iluvatar0", 0x1E3E, "Iluvatar BI-V150", 32 << 30, "2.7.1+corex.4.4.0", "cuda", ("corex",)),
    Vendor("cambricon", "dev/cambricon_dev0", 0xCABC, "MLU590-M9", 96 << 30, "2.7.1+cpu", "mlu", ("mlu",)),
    Vendor("amd", "dev/kfd", 0x1002, "AMD Instinct MI300X", 192 << 30, "2.11.0+rocm7.2"),
    Vendor("ascend", "dev/davinci0", 0x19E5, "Ascend910B3", 64 << 30, "2.10.0+cpu", "npu", ("npu",)),
    Vendor("mthreads", "dev/mtgpu.0", 0x1ED5, "MTT S5000", 80 << 30, "2.11.0", "musa", ("musa",)),
    Vendor("hygon", "dev/kfd", 0x1D94, "BW1000 64G", 64 << 30, "2.9.0+das.opt1.dtk2604"),
    Vendor("kunlunxin", "dev/xpu0", 0x1D22, "P800 OAM", 96 << 30, "2.9.0+cu129"),
)
pytestmark = pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)


def test_torch_is_asked_if_a_device_file_is_there(vendor: Vendor, tmp_path: Path) -> None:
    found = vendor.devices(tmp_path, vendor.torch)
    assert [(each.index, each.chip, each.memory_bytes) for each in found] == [
        (index, vendor.chip, vendor.memory_bytes) for index in range(2)
    ]


def test_devices_of_torch_have_the_names_in_the_variable(vendor: Vendor, tmp_path: Path) -> None:
    first, *_ = vendor.detector.visible
    names = "MIG-b,MIG-a" if vendor.name == "nvidia" else "4,5"
    said = f"import os\nassert os.environ[{first!r}] == {names!r}\n" + vendor.torch
    found = vendor.devices(tmp_path, said, **{first: names})
    assert [(each.index, each.selector) for each in found] == list(enumerate(names.split(",")))


def test_torch_is_not_asked_without_a_device_file(vendor: Vendor, tmp_path: Path) -> None:
    assert vendor.devices(tmp_path, vendor.torch, node=False) == ()


@pytest.mark.parametrize("torch", ["import os\nos.abort()\n", "raise ImportError\n"])
def test_a_torch_that_crashes_or_is_missing_lists_no_device(vendor: Vendor, tmp_path: Path, torch: str) -> None:
    assert vendor.devices(tmp_path, torch) == ()


def test_only_reports_of_the_vendors_own_torch_are_trusted(vendor: Vendor) -> None:
    device = Device(index=0, chip=vendor.chip, memory_bytes=vendor.memory_bytes)
    own = TorchReport(version=vendor.version, attributes=frozenset(vendor.attributes), devices=(device,))
    assert vendor.detector.torch_devices(own) == (device,)
    assert vendor.detector.torch_devices(FOREIGN) == ()
    assert vendor.detector.torch_devices(None) == ()


def test_devices_only_on_the_pci_bus_are_not_listed(vendor: Vendor, tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:0e:00.0"
    folder.mkdir(parents=True)
    files = {"vendor": f"{vendor.pci_vendor:#06x}", "class": "0x120000", "device": "0x4001"}
    for name, value in (files | {"current_link_width": "8", "max_link_width": "16"}).items():
        (folder / name).write_text(value + "\n")
    assert machine.pci_ids(vendor.pci_vendor, tmp_path) == ("0x4001",)
    assert machine.pci_ids(0x1234, tmp_path) == ()
    (problem,) = vendor.detector.problems(tmp_path)[-1:]
    assert {"0000:0e:00.0", "8", "16"} <= set(problem.split())
    (folder / "current_link_width").write_text("16\n")
    assert machine.narrow_links(vendor.pci_vendor, tmp_path) == ()
    assert vendor.devices(tmp_path, vendor.torch, node=False) == ()
