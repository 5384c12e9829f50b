"""Output of ixsmi on real machines (tests/smi) and other layouts derived from it, in addition to the kit's checks."""

from pathlib import Path

from flagcore_iluvatar import smi

SMI = Path(__file__).parent / "smi"


def text(name: str) -> str:
    return (SMI / name).read_text("utf-8")


def test_only_the_second_chip_of_a_card_reports_power() -> None:
    rows = smi.read(text("ixsmi-1.txt")).rows
    assert [row.device.index for row in rows if "power_watts" in row.reading] == list(range(1, 16, 2))
    assert rows[1].reading == {
        "memory_used_bytes": 116 * 2**20,
        "power_watts": 93,
        "power_limit_watts": 350,
        "temperature_celsius": 30,
        "utilization_share": 0,
        "clock_hertz": 1.5e9,
    }


def test_uuids_are_listed_by_index() -> None:
    assert smi.uuids("0, GPU-1a2b\n1, GPU-3c4d\nN/A\n") == {0: "GPU-1a2b", 1: "GPU-3c4d"}


TABLE = text("ixsmi-5.txt")


def test_a_name_without_the_vendor_is_unchanged() -> None:
    named = TABLE.replace("Iluvatar MR-V100 DUO", "BI-V100             ")
    assert {row.device.chip for row in smi.read(named).rows} == {"BI-V100"}


def test_a_device_whose_memory_is_an_error_is_left_out_and_reported() -> None:
    listing = smi.read(TABLE.replace("68MiB / 32768MiB     |", "ERR!                 |", 1))
    assert [row.device.index for row in listing.rows] == [1]
    assert ["00000000:35:00.0" in line for line in listing.left_out] == [True]


def test_a_device_that_hangs_is_left_out_and_reported() -> None:
    # the line of such a device in dillonfzw/utils house_clean_gpus_iluvatar.sh, in the table of ixsmi-6.txt
    whole = text("ixsmi-6.txt")
    hangs = whole.replace(
        "| 0%   31C   P0    57W / 250W   | 513MiB / 32768MiB    | 0%        Default    |",
        "| 0%   0C    P0    65535W / 250 | 513MiB / 32768MiB    | 100%      Default    |",
    )
    listing = smi.read(hangs)
    assert 5 not in [row.device.index for row in listing.rows]
    assert ["65535 W" in line for line in listing.left_out] == [True]
    assert smi.read(whole).rows[5].reading["power_watts"] == 57
