"""Output of ixsmi on real machines (tests/smi), complete, truncated and garbled, in addition to the kit's checks."""

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


def test_the_table_of_nvidia_is_rejected() -> None:
    table = text("ixsmi-4.txt").replace("IX-ML:", "NVIDIA-SMI")
    assert smi.read(table).rows == ()


def test_uuids_are_listed_by_index() -> None:
    assert smi.uuids("0, GPU-1a2b\n1, GPU-3c4d\nN/A\n") == {0: "GPU-1a2b", 1: "GPU-3c4d"}
