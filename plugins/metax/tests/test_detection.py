"""Which devices are found: by the tool, without it, and not at all. Tools and torch are real processes, faked."""

import os
from pathlib import Path

import pytest
from flagcore_metax import discover, hooks

from flagcore.domain.chip import Device
from flagcore.vendorkit import machine
from flagcore.vendorkit.machine import TorchSays
from flagcore.vendorkit.telemetry import SharedTable

TABLE = (Path(__file__).parent / "smi/mx-smi-1.txt").read_text("utf-8")
TORCH = """
from types import SimpleNamespace
__version__ = "2.10.0+metax3.8.1.0"

def get_device_properties(index):
    return SimpleNamespace(name="MetaX C500", total_memory=64 << 30)
cuda = SimpleNamespace(device_count=lambda: 2, get_device_properties=get_device_properties)
print("a banner of the image {with braces}")
"""


def says(version: str, name: str, *attributes: str) -> TorchSays:
    return TorchSays(version=version, attributes=frozenset(attributes), devices=(Device(index=0, chip=name),))


VENDORS = {
    "nvidia": says("2.10.0+cu129", "NVIDIA H200"),
    "metax": says("2.10.0+metax3.8.1.0", "MetaX C500"),
    "iluvatar": says("2.7.1+corex.4.4.0", "Iluvatar BI-V150", "corex"),
    "cambricon": says("2.7.1+cpu", "MLU590-M9", "mlu"),
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*discover.OVERRIDES, "CUDA_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")


def tool(tmp_path: Path, text: str = TABLE) -> None:
    (tmp_path / "table").write_text(text, "utf-8")
    script = tmp_path / "bin" / "mx-smi"
    script.write_text(f"#!/bin/sh\nexec cat {tmp_path}/table\n")
    script.chmod(0o755)


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = TORCH) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))


def node(root: Path) -> Path:
    (root / "dev/mxcd").parent.mkdir(exist_ok=True)
    (root / "dev/mxcd").touch()
    return root


def test_the_tool_lists_all_devices(tmp_path: Path) -> None:
    tool(tmp_path)
    assert len(discover.devices(tmp_path)) == 8


def test_only_visible_devices_count_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path)
    monkeypatch.setenv("MACA_VISIBLE_DEVICES", "2,0")
    assert [device.index for device in discover.devices(tmp_path)] == [2, 0]
    monkeypatch.setenv("MACA_VISIBLE_DEVICES", "-1")
    assert discover.devices(tmp_path) == ()


@pytest.mark.parametrize("variable", discover.OVERRIDES)
def test_an_environment_that_names_another_vendor_hides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    tool(tmp_path)
    monkeypatch.setenv(variable, "somebody_else")
    assert discover.devices(tmp_path) == ()
    monkeypatch.setenv(variable, "METAX")
    assert len(discover.devices(tmp_path)) == 8


def test_without_the_tool_torch_is_asked_if_a_device_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, monkeypatch)
    assert discover.devices(tmp_path) == ()
    found = discover.devices(node(tmp_path))
    assert [(each.index, each.chip, each.memory_bytes) for each in found] == [
        (index, "MetaX C500", 64 << 30) for index in range(2)
    ]


def test_a_library_that_crashes_when_it_is_loaded_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "import os\nos.abort()\n")
    assert discover.devices(node(tmp_path)) == ()


def test_no_device_without_tool_and_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "raise ImportError\n")
    assert discover.devices(node(tmp_path)) == ()


@pytest.mark.parametrize("vendor", VENDORS)
def test_what_torch_says_is_believed_of_its_own_devices_only(vendor: str) -> None:
    assert bool(discover.torch_devices(VENDORS[vendor])) == (vendor == "metax")


def test_devices_on_the_pci_bus_alone_are_none(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:0e:00.0"
    folder.mkdir(parents=True)
    for name, value in {"vendor": "0x9999", "class": "0x030200", "device": "0x4001"}.items():
        (folder / name).write_text(value + "\n")
    assert machine.pci_ids(0x9999, tmp_path) == ("0x4001",)
    assert machine.pci_ids(0x1234, tmp_path) == ()
    assert discover.devices(tmp_path) == ()


def test_a_tool_that_fails_or_prints_something_else_lists_nothing(tmp_path: Path) -> None:
    tool(tmp_path, "segmentation fault\n")
    assert discover.devices(tmp_path) == ()
    os.chmod(tmp_path / "bin" / "mx-smi", 0o644)
    assert discover.devices(tmp_path) == ()


def test_uuids_are_asked_for_where_visible_devices_are_named_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path)
    lines = "\n".join(f"GPU#{index}  MXC500  0000:2b:00.0  Available (UUID: GPU-{index}abc)" for index in range(8))
    (tmp_path / "list").write_text(lines)
    script = f'#!/bin/sh\n[ "$1" = -L ] && exec cat {tmp_path}/list\nexec cat {tmp_path}/table\n'
    (tmp_path / "bin" / "mx-smi").write_text(script)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5abc,GPU-1abc")
    assert [device.index for device in discover.devices(tmp_path)] == [5, 1]


def test_a_known_device_is_read_during_a_trial_and_an_unknown_chip_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path)
    monkeypatch.setattr(hooks, "TABLE", SharedTable(discover.now))
    reader = hooks.flagcore_telemetry(Device(index=1, chip="MetaX C500"))
    assert reader is not None
    reading = reader.sample()
    assert reading["memory_used_bytes"] == 826 * 2**20
    assert {"power_watts", "temperature_celsius"} <= set(reading)
    assert hooks.flagcore_telemetry(Device(index=1, chip="somebody else's")) is None
