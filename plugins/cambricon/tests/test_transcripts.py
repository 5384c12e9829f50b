"""Output of cnmon on real machines (tests/smi), complete, truncated and garbled, in addition to the kit's checks."""

from pathlib import Path

import pytest
from flagcore_cambricon import smi

SMI = Path(__file__).parent / "smi"


def text(name: str) -> str:
    return (SMI / name).read_text("utf-8")


def test_readings_have_power_memory_temperature_and_load() -> None:
    assert smi.read(text("cnmon-1.txt")).rows[1].reading == {
        "memory_used_bytes": 0,
        "power_watts": 106,
        "power_limit_watts": 250,
        "temperature_celsius": 39,
        "utilization_share": 0,
    }


def test_a_version_without_a_letter_and_power_with_cents_are_read() -> None:
    (row,) = smi.read(text("cnmon-6.txt")).rows
    assert (row.device.chip, row.device.driver) == ("MLU220-M2", "4.6.9")
    assert (row.reading["power_watts"], row.reading["power_limit_watts"]) == (3.7, 8.25)


def test_without_a_table_the_details_of_a_card_are_read() -> None:
    # the shape that a public scheduler's unit test of CNMON v4.20.18 has
    details = """\
================CNMON v4.20.18================
Card 0
    Product Name                   : MLU370-S4
    Driver                         : v4.20.18
    Utilization                    :
        MLU Average                : 66 %
    Temperature                    :
        Board                      : 49 C
    Physical Memory Usage          :
        Total                      : 23308 MiB
        Used                       : 4096 MiB
    Virtual Memory Usage           :
        Total                      : 1048576 MiB
    Power                          :
        Usage                      : 38 W
Card 1
    Product Name                   : N/A
"""
    listing = smi.read(details)
    (row,) = listing.rows
    assert ["card 1" in line for line in listing.left_out] == [True]
    assert (row.device.chip, row.device.driver, row.device.memory_bytes) == ("MLU370-S4", "4.20.18", 23308 * 2**20)
    assert row.reading == {
        "memory_used_bytes": 4 << 30,
        "power_watts": 38,
        "temperature_celsius": 49,
        "utilization_share": pytest.approx(0.66),
    }
    assert smi.read(details.replace("23308 MiB", "N/A")).rows == ()
