"""Whose devices a node has, where every vendor's plugin looks at it: by device files, torch, PCI ids and overrides.

The node is faked: files below a folder, and a module torch that a process of its own imports.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

VENDORS = ("nvidia", "metax", "iluvatar", "cambricon", "amd", "ascend", "mthreads", "hygon", "kunlunxin")
FILES = {
    "nvidia": "nvidia0",
    "metax": "mxcd",
    "iluvatar": "iluvatar0",
    "cambricon": "cambricon_dev0",
    "amd": "kfd",
    "ascend": "davinci0",
    "mthreads": "mtgpu.0",
    "hygon": "kfd",
    "kunlunxin": "xpu0",
}
PCI = {
    "nvidia": "0x10de",
    "metax": "0x9999",
    "iluvatar": "0x1e3e",
    "cambricon": "0xcabc",
    "amd": "0x1002",
    "ascend": "0x19e5",
    "mthreads": "0x1ed5",
    "hygon": "0x1d94",
    "kunlunxin": "0x1d22",
}
NAMES = {
    "nvidia": "NVIDIA H200",
    "metax": "MetaX C500",
    "iluvatar": "Iluvatar BI-V150",
    "cambricon": "MLU590-M9",
    "amd": "AMD Instinct MI300X",
    "ascend": "Ascend910B3",
    "mthreads": "MTT S5000",
    "hygon": "BW1000 64G",
    "kunlunxin": "P800 OAM",
}
VERSIONS = {
    "nvidia": "2.10.0+cu129",
    "metax": "2.6.0+metax3.3.0.2",
    "iluvatar": "2.7.1+corex.4.4.0",
    "cambricon": "2.7.1+cpu",
    "amd": "2.11.0+rocm7.2",
    "ascend": "2.10.0+cpu",
    "mthreads": "2.11.0",
    "hygon": "2.9.0+das.opt1.dtk2604",
    "kunlunxin": "2.9.0+cu129",
}
TORCH = """
from types import SimpleNamespace
__version__ = "{version}"

def get_device_properties(index):
    return SimpleNamespace(name="{name}", total_memory=64 << 30)
backend = SimpleNamespace(device_count=lambda: 2, get_device_properties=get_device_properties)
cuda = backend
{more}
"""
MORE = {
    "iluvatar": "corex = True",
    "cambricon": "mlu = backend  # and cuda is an alias of it",
    "ascend": "npu = backend  # and cuda is an alias of it",
    "mthreads": "musa = backend  # and cuda is an alias of it",
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GEMS_VENDOR", "FLAGGEMS_VENDOR", "GEMS_BACKEND", "FLAGGEMS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA", "MACA", "MLU", "HIP", "ROCR", "ASCEND_RT", "MUSA", "XPU"):
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def node(root: Path, monkeypatch: pytest.MonkeyPatch, torch_of: str, *files: str) -> None:
    (root / "dev").mkdir()
    for vendor in files:
        (root / "dev" / FILES[vendor]).touch()
    (root / "modules").mkdir()
    text = TORCH.format(version=VERSIONS[torch_of], name=NAMES[torch_of], more=MORE.get(torch_of, ""))
    (root / "modules" / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(root / "modules"))


def listed(root: Path) -> dict[str, list[str]]:
    """Return the names of the devices that each vendor's plugin lists, without the plugins that list none."""
    found = {name: importlib.import_module(f"flagcore_{name}.discover").DETECTOR.devices(root) for name in VENDORS}
    return {name: [each.chip for each in devices] for name, devices in found.items() if devices}


@pytest.mark.parametrize("vendor", VENDORS)
def test_torch_identifies_the_vendor_of_devices(vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node(tmp_path, monkeypatch, vendor, vendor)
    assert listed(tmp_path) == {vendor: [NAMES[vendor]] * 2}


@pytest.mark.parametrize("vendor", VENDORS)
def test_with_device_files_of_all_vendors_a_device_has_one_plugin(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(tmp_path, monkeypatch, vendor, *VENDORS)
    assert listed(tmp_path) == {vendor: [NAMES[vendor]] * 2}


@pytest.mark.parametrize("vendor", VENDORS)
def test_devices_on_the_bus_without_a_driver_are_reported_and_not_listed(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node(tmp_path, monkeypatch, vendor)
    folder = tmp_path / "sys/bus/pci/devices/0000:0e:00.0"
    folder.mkdir(parents=True)
    for name, value in {"vendor": PCI[vendor], "class": "0x120000", "device": "0x4001"}.items():
        (folder / name).write_text(value + "\n")
    assert listed(tmp_path) == {}
    assert ["on the PCI bus" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_users_environment_goes_before_all(vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node(tmp_path, monkeypatch, vendor, vendor)
    monkeypatch.setenv("GEMS_VENDOR", "somebody_else")
    assert listed(tmp_path) == {}
    monkeypatch.setenv("GEMS_VENDOR", vendor.upper())
    assert list(listed(tmp_path)) == [vendor]


def test_a_crash_in_torchs_native_library_ends_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(tmp_path, monkeypatch, "metax", *VENDORS)
    (tmp_path / "modules" / "torch.py").write_text("import os\nos.abort()\n")
    assert listed(tmp_path) == {}


def test_names_of_older_nvidia_drivers_are_accepted_from_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "nvidia", "Tesla V100-SXM2-32GB")
    node(tmp_path, monkeypatch, "nvidia", "nvidia")
    assert listed(tmp_path) == {"nvidia": ["Tesla V100-SXM2-32GB"] * 2}
