"""What cnmon printed on real machines (tests/smi, sources in sources.yaml), whole, cut and garbled."""

import random
from pathlib import Path

import pytest
import yaml
from flagcore_cambricon import smi

SMI = Path(__file__).parent / "smi"
TABLES = {
    "cnmon-1.txt": ("MLU370-X8", 2, "5.10.13", 23374),
    "cnmon-2.txt": ("MLU370-X4", 3, "4.20.11", 23308),
    "cnmon-3.txt": ("MLU370-X8", 2, "5.10.22", 20638),
    "cnmon-5.txt": ("MLU370-X4", 2, "5.10.10", 23308),
}


def text(name: str) -> str:
    return (SMI / name).read_text("utf-8")


def test_each_transcript_has_its_source_and_is_read_here() -> None:
    present = {path.name for path in SMI.iterdir()} - {"sources.yaml"}
    assert set(yaml.safe_load(text("sources.yaml"))) == present == {*TABLES, "cnmon-4.txt"}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_whole(name: str) -> None:
    chip, count, driver, mib = TABLES[name]
    rows = smi.parse(text(name))
    assert [row.device.index for row in rows] == list(range(count))
    assert {(row.device.chip, row.device.driver, row.device.memory_bytes) for row in rows} == {
        (chip, driver, mib * 2**20)
    }


def test_readings_have_power_memory_temperature_and_load() -> None:
    assert smi.parse(text("cnmon-1.txt"))[1].reading == {
        "memory_used_bytes": 0,
        "power_watts": 106,
        "power_limit_watts": 250,
        "temperature_celsius": 39,
        "utilization_share": 0,
    }


def test_names_and_memory_that_were_crossed_out_are_no_devices() -> None:
    assert smi.parse(text("cnmon-4.txt")) == ()


def test_a_virtual_function_is_no_device_of_its_own() -> None:
    table = text("cnmon-1.txt").replace("| 1     /   MLU", "| 1     0   MLU")
    assert [row.device.index for row in smi.parse(table)] == [0]


def test_a_chip_that_is_not_in_the_catalogue_keeps_its_name() -> None:
    table = text("cnmon-1.txt").replace("MLU370-X8    v1.1.6", "MLU590-M9DG  v1.1.1").replace("23374", "81920")
    assert {(row.device.chip, row.device.memory_bytes) for row in smi.parse(table)} == {("MLU590-M9DG", 80 << 30)}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_cut_anywhere_tells_only_what_is_sure(name: str) -> None:
    whole = smi.parse(text(name))
    for end in range(0, len(text(name)), 7):
        rows = smi.parse(text(name)[:end])
        assert [row.device.index for row in rows] == [row.device.index for row in whole[: len(rows)]]
        assert {(row.device.chip, row.device.memory_bytes) for row in rows} <= {
            (whole[0].device.chip, whole[0].device.memory_bytes)
        }


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_never_raise_nor_add_a_device(seed: int) -> None:
    dice = random.Random(seed)
    garbled = bytearray(text("cnmon-2.txt").encode())
    for _ in range(dice.choice((1, 20, 200))):
        garbled[dice.randrange(len(garbled))] = dice.randrange(256)
    rows = smi.parse(garbled.decode("utf-8", "replace"))
    assert len({row.device.index for row in rows}) == len(rows) <= 3


def test_another_tool_of_this_name_is_not_believed() -> None:
    assert smi.parse(text("cnmon-1.txt").replace("CNMON v", "CN Monitor ")) == ()


def test_the_details_of_a_card_are_read_where_there_is_no_table() -> None:
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
    Power                          :
        Usage                      : 38 W
"""
    (row,) = smi.parse(details)
    assert (row.device.chip, row.device.driver, row.device.memory_bytes) == ("MLU370-S4", "4.20.18", 23308 * 2**20)
    assert row.reading == {
        "memory_used_bytes": 4 << 30,
        "power_watts": 38,
        "temperature_celsius": 49,
        "utilization_share": pytest.approx(0.66),
    }
    assert smi.parse(details.replace("23308 MiB", "N/A")) == ()
