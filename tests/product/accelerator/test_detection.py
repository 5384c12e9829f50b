"""The devices of a vendor that no plugin of this repository knows, as its tool lists them."""

import json
import os
import re

import pytest

from tests.product.accelerator.machine import MEMORY_BYTES, Machine

pytestmark = [pytest.mark.slow, pytest.mark.together("training")]


def test_a_variable_selects_the_devices_and_their_order(simulated: Machine) -> None:
    listed = simulated.flag("devices", "--json", "--no-plugin", "cpu", SIMU_VISIBLE_DEVICES="3,1").stdout
    assert [(each["index"], each["chip"], each["plugin"]) for each in json.loads(listed)] == [
        (3, "S1", "simu"),
        (1, "S1", "simu"),
    ]


@pytest.mark.long
def test_without_the_tool_torch_lists_the_devices(built: Machine) -> None:
    (built.folder / "root" / "dev").mkdir(parents=True)
    (built.folder / "root" / "dev" / "simu0").touch()
    code = """
import os
from pathlib import Path
from flagcore_simu.discover import DETECTOR
for device in DETECTOR.devices(Path("root"), {**os.environ, "SIMU_VISIBLE_DEVICES": "3,1"}):
    print(device.index, device.name, device.chip, device.memory_bytes)
"""
    printed = built.python(code, PATH=os.defpath)
    assert printed.splitlines() == [f"0 3 Simu S1 {MEMORY_BYTES}", f"1 1 Simu S1 {MEMORY_BYTES}"]


@pytest.mark.long
def test_without_the_plugin_a_chip_is_measured_through_torch(built: Machine) -> None:
    """The installed torch is a build for CPUs, to which the vendor's extension adds the device."""
    variables = {**built.loaded_by_torch(), "FLAGCORE_HOME": str(built.folder / "unlisted")}
    others = ("--no-plugin", "simu", "--no-plugin", "cpu")
    built.flag("calibrate", "--seconds", "5", "--devices", "1", *others, **variables)
    (file,) = (built.folder / "unlisted" / "calibrations").glob("*.json")
    data = json.loads(file.read_text())
    assert data["chip"] == "Simu S1"
    assert (data["facts"]["device_type"], data["facts"]["distributed_backend"]) == ("simu", "simuccl")


@pytest.mark.long
def test_the_plugin_passes_the_kit(simulated: Machine) -> None:
    report = simulated.flag("plugins", "check", "flagcore-simu").stdout
    assert re.match(r"simu 0\.1\.0: \d{2,} passed, 0 failed", report)
