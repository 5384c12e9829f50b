"""What ixsmi printed on real machines (tests/smi, sources in sources.yaml), whole, cut and garbled."""

import random
from pathlib import Path

import pytest
import yaml
from flagcore_iluvatar import smi

SMI = Path(__file__).parent / "smi"
TABLES = {
    "ixsmi-1.txt": ("Iluvatar BI-V150", 16, "4.1.0"),
    "ixsmi-2.txt": ("Iluvatar BI-V150", 2, "4.3.0"),
    "ixsmi-3.txt": ("Iluvatar BI-V150S", 1, "4.1.0"),
    "ixsmi-4.txt": ("Iluvatar BI-V100", 1, "3.1.0"),
    "ixsmi-5.txt": ("Iluvatar MR-V100 DUO", 2, "4.4.0"),
}


def text(name: str) -> str:
    return (SMI / name).read_text("utf-8")


def test_each_transcript_has_its_source_and_is_read_here() -> None:
    present = {path.name for path in SMI.iterdir()} - {"sources.yaml"}
    assert set(yaml.safe_load(text("sources.yaml"))) == present == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_whole(name: str) -> None:
    chip, count, driver = TABLES[name]
    rows = smi.parse(text(name))
    assert [row.device.index for row in rows] == list(range(count))
    assert {(row.device.chip, row.device.driver, row.device.memory_bytes) for row in rows} == {(chip, driver, 32 << 30)}
    assert len({row.bus for row in rows}) == count


def test_of_a_card_with_two_chips_only_the_second_tells_the_power() -> None:
    rows = smi.parse(text("ixsmi-1.txt"))
    assert [row.device.index for row in rows if "power_watts" in row.reading] == list(range(1, 16, 2))
    assert rows[1].reading == {
        "memory_used_bytes": 116 * 2**20,
        "power_watts": 93,
        "power_limit_watts": 350,
        "temperature_celsius": 30,
        "utilization_share": 0,
        "clock_hertz": 1.5e9,
    }


def test_an_idle_clock_is_told() -> None:
    assert smi.parse(text("ixsmi-3.txt"))[0].reading["clock_hertz"] == 0.5e9


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_is_cut_anywhere_tells_only_what_is_sure(name: str) -> None:
    whole = smi.parse(text(name))
    for end in range(0, len(text(name)), 7):
        rows = smi.parse(text(name)[:end])
        assert [row.device.index for row in rows] == [row.device.index for row in whole[: len(rows)]]
        assert {(row.device.chip, row.device.memory_bytes) for row in rows} <= {(whole[0].device.chip, 32 << 30)}


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_never_raise_nor_add_a_device(seed: int) -> None:
    dice = random.Random(seed)
    garbled = bytearray(text("ixsmi-1.txt").encode())
    for _ in range(dice.choice((1, 20, 400))):
        garbled[dice.randrange(len(garbled))] = dice.randrange(256)
    rows = smi.parse(garbled.decode("utf-8", "replace"))
    assert len({row.device.index for row in rows}) == len(rows) <= 16


def test_nvidias_table_is_not_taken_for_its_own() -> None:
    table = text("ixsmi-4.txt").replace("IX-ML:", "NVIDIA-SMI")
    assert smi.parse(table) == ()


def test_uuids_are_listed_by_index() -> None:
    assert smi.uuids("0, GPU-1a2b\n1, GPU-3c4d\nN/A\n") == {0: "GPU-1a2b", 1: "GPU-3c4d"}


def test_a_query_with_a_header_and_a_list_are_read() -> None:
    query = "index, name, memory.total [MiB], gpu.power.draw [W]\n0, Iluvatar BI-V150, 32768 MiB, 93.00 W\n"
    (row,) = smi.parse(query)
    assert (row.device.chip, row.device.memory_bytes, row.reading) == (
        "Iluvatar BI-V150",
        32 << 30,
        {"power_watts": 93},
    )
    (device,) = (row.device for row in smi.parse("GPU 0: Iluvatar MR-V100 (UUID: GPU-1a2b)\n"))
    assert (device.chip, device.memory_bytes, device.uuid) == ("Iluvatar MR-V100", None, "GPU-1a2b")
    assert smi.parse(query.replace("Iluvatar BI-V150", "NVIDIA H200")) == ()
