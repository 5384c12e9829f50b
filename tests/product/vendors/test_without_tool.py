"""Which devices each vendor's plugin finds where its tool is missing. torch is a real process."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
from flagcore_testing import fakes

from flagcore.vendorkit import machine
from flagcore.vendorkit.detection import DeviceDetector

TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
def get_device_properties(index):
    return SimpleNamespace(name={name!r}, total_memory={memory_bytes})
{kind} = SimpleNamespace(device_count=lambda: 2, get_device_properties=get_device_properties)
{attributes}
print("a banner of the image {{with braces}}")
"""
STRANGER = TORCH.format(
    kind="cuda", version="2.10.0+nobody1.0", name="Nobody N-100", memory_bytes=2**36, attributes="nobody = 1"
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
vendors = pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)


def listed(
    root: Path, torch: str, files: Sequence[Vendor], **variables: str
) -> dict[str, list[tuple[str, int | None]]]:
    """Return the devices that each vendor's plugin finds on a node with a torch of this source and device files."""
    (root / "modules").mkdir(exist_ok=True)
    (root / "modules" / "torch.py").write_text(torch)
    for each in files:
        (root / each.device_file).parent.mkdir(exist_ok=True)
        (root / each.device_file).touch()
    with fakes.machine(PYTHONPATH=str(root / "modules"), **variables):
        found = {each.name: each.detector.devices(root) for each in VENDORS}
    return {name: [(each.chip, each.memory_bytes) for each in devices] for name, devices in found.items() if devices}


@vendors
def test_torch_identifies_the_vendor_of_devices(vendor: Vendor, tmp_path: Path) -> None:
    assert listed(tmp_path, vendor.torch, VENDORS) == {vendor.name: [(vendor.chip, vendor.memory_bytes)] * 2}


def test_names_of_older_drivers_are_accepted_from_torch(tmp_path: Path) -> None:
    older = replace(VENDORS[0], chip="Tesla V100-SXM2-32GB")
    assert listed(tmp_path, older.torch, VENDORS[:1]) == {"nvidia": [(older.chip, older.memory_bytes)] * 2}


@vendors
def test_devices_of_torch_have_the_names_in_the_variable(vendor: Vendor, tmp_path: Path) -> None:
    first, *_ = vendor.detector.visible
    names = "MIG-b,MIG-a" if vendor.name == "nvidia" else "4,5"
    said = f"import os\nassert os.environ[{first!r}] == {names!r}\n" + vendor.torch
    assert list(listed(tmp_path, said, [vendor], **{first: names})) == [vendor.name]
    with fakes.machine(PYTHONPATH=str(tmp_path / "modules")):
        found = vendor.detector.devices(tmp_path, {**os.environ, first: names})
    assert [(each.index, each.selector) for each in found] == list(enumerate(names.split(",")))


@pytest.mark.parametrize("torch", ["import os\nos.abort()\n", "raise ImportError\n", STRANGER])
def test_a_torch_that_crashes_is_missing_or_is_of_a_stranger_lists_no_device(tmp_path: Path, torch: str) -> None:
    assert listed(tmp_path, torch, VENDORS) == {}


@vendors
def test_the_users_choice_of_a_vendor_goes_before_all(vendor: Vendor, tmp_path: Path) -> None:
    assert listed(tmp_path, vendor.torch, [vendor], GEMS_VENDOR="somebody_else") == {}
    assert list(listed(tmp_path, vendor.torch, [vendor], GEMS_VENDOR=vendor.name.upper())) == [vendor.name]


@vendors
def test_devices_only_on_the_pci_bus_are_reported_and_not_listed(
    vendor: Vendor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:0e:00.0"
    folder.mkdir(parents=True)
    files = {"vendor": f"{vendor.pci_vendor:#06x}", "class": "0x120000", "device": "0x4001"}
    for name, value in (files | {"current_link_width": "8", "max_link_width": "16"}).items():
        (folder / name).write_text(value + "\n")
    assert machine.pci_ids(vendor.pci_vendor, tmp_path) == ("0x4001",)
    assert machine.pci_ids(0x1234, tmp_path) == ()
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(STRANGER)
    with fakes.machine(PYTHONPATH=str(tmp_path / "modules")):
        (problem,) = vendor.detector.problems(tmp_path)[-1:]
    assert {"0000:0e:00.0", "8", "16"} <= set(problem.split())
    (folder / "current_link_width").write_text("16\n")
    assert machine.narrow_links(vendor.pci_vendor, tmp_path) == ()
    monkeypatch.setattr(fakes, "quiet", nullcontext)
    assert listed(tmp_path, vendor.torch, []) == {}
    assert ["on the PCI bus" in record.getMessage() for record in caplog.records] == [True]
