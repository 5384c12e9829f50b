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


def test_an_idle_clock_is_reported() -> None:
    assert smi.read(text("ixsmi-3.txt")).rows[0].reading["clock_hertz"] == 0.5e9


def test_the_table_of_nvidia_is_rejected() -> None:
    table = text("ixsmi-4.txt").replace("IX-ML:", "NVIDIA-SMI")
    assert smi.read(table).rows == ()


def test_uuids_are_listed_by_index() -> None:
    assert smi.uuids("0, GPU-1a2b\n1, GPU-3c4d\nN/A\n") == {0: "GPU-1a2b", 1: "GPU-3c4d"}


def test_a_query_with_a_header_and_a_list_are_read() -> None:
    query = "index, name, memory.total [MiB], gpu.power.draw [W]\n0, Iluvatar BI-V150, 32768 MiB, 93.00 W\n"
    (row,) = smi.read(query).rows
    assert (row.device.chip, row.device.memory_bytes, row.reading) == (
        "Iluvatar BI-V150",
        32 << 30,
        {"power_watts": 93},
    )
    (device,) = (row.device for row in smi.read("GPU 0: Iluvatar MR-V100 (UUID: GPU-1a2b)\n").rows)
    assert (device.chip, device.memory_bytes, device.uuid) == ("Iluvatar MR-V100", None, "GPU-1a2b")
    assert smi.read(query.replace("Iluvatar BI-V150", "NVIDIA H200")).rows == ()
