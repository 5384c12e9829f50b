"""What rocm-smi and amd-smi print (tests/smi), in addition to the kit's checks."""

import json
from pathlib import Path

import pytest
from flagcore_amd import discover, smi
from flagcore_testing import fakes
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import islands, read_matrix

TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_readings_have_power_memory_temperature_and_load() -> None:
    row = smi.read(TEXTS["rocm-smi-1.json"]).rows[3]
    assert row.device.uuid == "GPU-3c1f00aa5521e103"
    assert row.reading == {
        "memory_used_bytes": 171208212480,
        "power_watts": 134,
        "temperature_celsius": 39,
        "utilization_share": 0.97,
    }


def test_the_second_die_of_a_module_has_no_power() -> None:
    rows = smi.read(TEXTS["rocm-smi-2.json"]).rows
    assert ["power_watts" in row.reading for row in rows] == [True, False, True, False]


def test_a_card_without_memory_is_left_out_and_graphics_of_a_cpu_are_ignored() -> None:
    dead = TEXTS["rocm-smi-1.json"].replace('"206141652992"', '"N/A"', 1)
    assert ["card0" in line for line in smi.read(dead).left_out] == [True]
    integrated = TEXTS["rocm-smi-2.json"].replace("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "Radeon 780M")
    assert smi.read(integrated).rows == smi.read(integrated).left_out == ()


def test_amd_smi_has_devices_and_readings_in_two_commands() -> None:
    found = smi.with_metrics(smi.read(TEXTS["amd-smi-1.json"]), smi.read_metrics(TEXTS["amd-smi-2.json"]))
    assert found.rows[7].device.memory_bytes == 294896 << 20
    assert found.rows[7].reading == {
        "memory_used_bytes": 290 << 20,
        "power_watts": 247,
        "temperature_celsius": 52,
        "utilization_share": pytest.approx(0.84),
    }


def test_amd_smi_of_older_releases_prints_a_list() -> None:
    older = json.dumps(json.loads(TEXTS["amd-smi-1.json"])["gpu_data"])
    assert smi.read(older) == smi.read(TEXTS["amd-smi-1.json"])
    assert smi.read(older.replace("294896", '"N/A"', 1)).left_out != ()


def test_amd_smi_may_print_a_single_device_without_a_list() -> None:
    first = json.loads(TEXTS["amd-smi-1.json"])["gpu_data"][0]
    assert smi.read(json.dumps(first)).rows == smi.read(TEXTS["amd-smi-1.json"]).rows[:1]


def test_links_are_read_from_the_matrix_of_link_types() -> None:
    with fakes.machine({"rocm-smi": fakes.prints(TEXTS["rocm-smi-3.txt"])}):
        matrix = read_matrix(discover.DETECTOR.matrix())
    assert matrix is not None
    assert islands(matrix, "XGMI") == (tuple(range(8)),)
