"""Output of nvidia-smi on real machines (tests/smi), complete, truncated and garbled, in addition to the kit's
checks."""

import json
from pathlib import Path

import pytest
from flagcore_nvidia import smi
from flagcore_nvidia.hooks import plugin

from flagcore.vendorkit.matrix import devices_per_adapter, islands, near_adapters, read_matrix

SMI = Path(__file__).parent / "smi"
TABLES = {
    "nvidia-smi-1.txt": ("NVIDIA L40S", 1, 46068),
    "nvidia-smi-2.txt": ("NVIDIA H100 80GB HBM3", 6, 81559),
    "nvidia-smi-7.txt": ("Tesla P100-SXM2...", 1, 16280),
}
MATRICES = ("nvidia-smi-5.txt", "nvidia-smi-6.txt")
QUERY = "\n".join(f"{i}, NVIDIA H200, 143771, 570.211.01, GPU-{i}aaa, 0x233510DE, Disabled" for i in range(8)) + "\n"


def text(name: str) -> str:
    return (SMI / name).read_text("utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_whole(name: str) -> None:
    chip, count, mib = TABLES[name]
    rows = smi.read(text(name)).rows
    assert [row.device.index for row in rows] == list(range(count))
    assert {(row.device.chip, row.device.memory_bytes) for row in rows} == {(chip, mib * 2**20)}
    assert {"memory_used_bytes", "power_watts", "power_limit_watts", "temperature_celsius"} <= set(rows[0].reading)


def test_a_header_names_the_columns() -> None:
    rows = smi.read(text("nvidia-smi-3.csv")).rows
    assert [(row.device.index, row.device.memory_bytes) for row in rows] == [(i, 143771 * 2**20) for i in range(8)]
    assert {(row.device.chip, row.device.driver) for row in rows} == {("NVIDIA H200", "570.211.01")}
    assert {row.reading["power_limit_watts"] for row in rows} == {700}


def test_a_line_without_a_header_is_read_only_with_the_fields_that_were_requested() -> None:
    fields = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    assert smi.read(text("nvidia-smi-4.csv")).rows == ()
    (row,) = smi.read(text("nvidia-smi-4.csv"), fields).rows
    assert (row.device.chip, row.device.memory_bytes) == ("NVIDIA GeForce RTX 4090", 24564 * 2**20)


def test_a_reading_has_the_fields_of_its_query() -> None:
    identity = "0, NVIDIA H200, 143771, 570.2, GPU-1a, 0x233510DE, Disabled, 00000000:0F:00.0"
    line = f"{identity}, 1024, 412.50, 700.00, 61, 97, 1980"
    (row,) = smi.read(line, smi.READING_FIELDS).rows
    assert row.reading == {
        "memory_used_bytes": 2**30,
        "power_watts": 412.5,
        "power_limit_watts": 700,
        "temperature_celsius": 61,
        "utilization_share": pytest.approx(0.97),
        "clock_hertz": 1.98e9,
    }


@pytest.mark.parametrize(
    "foreign",
    [
        "0, MetaX C500, 65536, 3.4, GPU-1, 0x40019999, [N/A]",
        "0, Iluvatar BI-V150, 32768, 4.1, GPU-1, 0x00021E3E, [N/A]",
    ],
)
def test_another_vendors_nvidia_smi_is_distinguished_by_the_pci_id(foreign: str) -> None:
    assert smi.read(foreign).rows == ()


def test_an_unknown_gpu_is_listed_by_its_name() -> None:
    (row,) = smi.read("0, NVIDIA Z900 96GB, 98304, 999.1, GPU-1, 0x999910DE, Disabled").rows
    assert row.device.chip == "NVIDIA Z900 96GB"
    assert not any(chip.has_name(row.device.chip) for chip in plugin.flagcore_chips())


def test_a_query_that_is_cut_at_a_line_reports_the_lines_before() -> None:
    lines = QUERY.splitlines()
    for end in range(len(lines) + 1):
        assert len(smi.read("\n".join(lines[:end])).rows) == end
    assert len(smi.read(QUERY[: QUERY.rindex(",")]).rows) == 7


@pytest.mark.parametrize("name", MATRICES)
def test_nvlink_joins_all_devices_and_each_has_an_adapter(name: str) -> None:
    matrix = read_matrix(text(name))
    assert matrix is not None
    assert islands(matrix, r"NV\d+") == (tuple(range(8)),)
    assert all(len(near) == 1 for near in near_adapters(matrix).values())
    assert set(devices_per_adapter(matrix).values()) == {1}


def test_pairs_of_bridged_devices_are_islands_and_a_ring_is_not() -> None:
    pairs = "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X \tNV4\tSYS\tSYS\nGPU1\tNV4\t X \tSYS\tSYS\n"
    pairs += "GPU2\tSYS\tSYS\t X \tNV4\nGPU3\tSYS\tSYS\tNV4\t X \n"
    ring = pairs.replace("NV4\tSYS\tSYS", "NV4\tSYS\tNV4").replace("SYS\tSYS\t X \tNV4", "SYS\tNV4\t X \tNV4")
    ring = ring.replace("GPU1\tNV4\t X \tSYS", "GPU1\tNV4\t X \tNV4").replace("GPU3\tSYS\tSYS", "GPU3\tNV4\tSYS")
    made, around = read_matrix(pairs), read_matrix(ring)
    assert made is not None
    assert around is not None
    assert islands(made, r"NV\d+") == ((0, 1), (2, 3))
    assert islands(around, r"NV\d+") == ()


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_that_is_cut_within_the_devices_rows_is_refused(name: str) -> None:
    lines = text(name).splitlines()
    for end in range(9):
        assert read_matrix("\n".join(lines[:end])) is None
    assert read_matrix("\n".join(lines[:9])) is not None


def test_devices_of_another_detector_match_the_catalogue() -> None:
    found = json.loads(text("detect-gpustack-h100.json"))
    (name,) = {each["name"] for each in found}
    (chip,) = (chip for chip in plugin.flagcore_chips() if chip.has_name(name))
    assert chip.name == "H100-SXM"
    assert chip.memory_bytes is not None
    assert {each["memory"] * 2**20 for each in found} == {chip.memory_bytes.value}
    (topology,) = json.loads(text("topology-gpustack-h200.json"))
    assert {each["links_active_count"] for each in topology["appendices"]} == {18}


def test_a_list_of_gpus_reports_names_without_memory() -> None:
    (row,) = smi.read("GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1a2b)\n").rows
    assert (row.device.chip, row.device.memory_bytes) == ("NVIDIA A100-SXM4-80GB", None)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("NVIDIA H200", True),
        ("Tesla V100-SXM2-32GB", True),
        ("A100-SXM4-40GB", True),
        ("GRID A100D-40C", True),
        ("MetaX C500", False),
        ("MXC550", False),
        ("Iluvatar BI-V150", False),
        ("MLU370-X8", False),
        ("Device 4000", False),
    ],
)
def test_without_a_pci_id_the_name_determines_the_vendor(name: str, ours: bool) -> None:
    assert bool(smi.read(f"index, name, memory.total [MiB]\n0, {name}, 65536 MiB\n").rows) == ours


def test_a_gpu_divided_into_instances_is_left_out_and_reported() -> None:
    listing = smi.read(QUERY.replace("GPU-3aaa, 0x233510DE, Disabled", "GPU-3aaa, 0x233510DE, Enabled"))
    assert [row.device.index for row in listing.rows] == [0, 1, 2, 4, 5, 6, 7]
    assert [line.startswith("GPU 3 (NVIDIA H200) is divided into instances") for line in listing.left_out] == [True]
