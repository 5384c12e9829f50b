"""Output of nvidia-smi on real machines (tests/smi), complete, truncated and garbled, in addition to the kit's
checks."""

import json
from pathlib import Path

import pytest
from flagcore_nvidia import smi
from flagcore_nvidia.hooks import plugin

from flagcore.vendorkit.matrix import devices_per_adapter, islands, near_adapters, read_matrix

SMI = Path(__file__).parent / "smi"
MATRICES = ("nvidia-smi-5.txt", "nvidia-smi-6.txt")
QUERY = "\n".join(f"{i}, NVIDIA H200, 143771, 570.211.01, GPU-{i}aaa, 0x233510DE, Disabled" for i in range(8)) + "\n"


def text(name: str) -> str:
    return (SMI / name).read_text("utf-8")


def test_a_line_without_a_header_is_read_only_with_the_fields_that_were_requested() -> None:
    fields = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    assert smi.read(text("nvidia-smi-4.csv")).rows == ()
    (row,) = smi.read(text("nvidia-smi-4.csv"), fields).rows
    assert (row.device.chip, row.device.memory_bytes) == ("NVIDIA GeForce RTX 4090", 24564 * 2**20)


def test_a_table_has_readings() -> None:
    assert {"memory_used_bytes", "power_watts", "power_limit_watts", "temperature_celsius"} <= set(
        smi.read(text("nvidia-smi-2.txt")).rows[0].reading
    )


def test_a_reading_has_the_fields_of_its_query() -> None:
    identity = "0, NVIDIA H200, 143771, 570.2, GPU-1a, 0x233510DE, Disabled"
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
