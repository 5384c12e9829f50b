"""Output of nvidia-smi in addition to the kit's checks: of real machines (tests/smi), and layouts derived from them."""

import json
from pathlib import Path

import pytest
from flagcore_nvidia import discover
from flagcore_nvidia.discover import DETECTOR
from flagcore_nvidia.hooks import plugin
from flagcore_testing import fakes
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import devices_per_adapter, islands, near_adapters, read_matrix

from flagcore.domain.chip import DeviceUse
from tests.checks import given

TEXTS = saved_outputs(Path(__file__).parent / "smi")
MATRICES = ("nvidia-smi-5.txt", "nvidia-smi-6.txt")


def test_a_line_without_a_header_is_read_only_with_the_fields_that_were_requested() -> None:
    fields = ("name", "memory.total", "pcie.link.gen.max", "pcie.link.width.max")
    assert discover.read(TEXTS["nvidia-smi-4.csv"]).rows == ()
    (row,) = discover.read(TEXTS["nvidia-smi-4.csv"], fields).rows
    assert (row.device.chip, row.device.memory_bytes) == ("NVIDIA GeForce RTX 4090", 24564 * 2**20)


@pytest.mark.parametrize("name", MATRICES)
def test_nvlink_joins_all_devices_and_each_has_an_adapter(name: str) -> None:
    matrix = given(read_matrix(TEXTS[name]))
    assert islands(matrix, r"NV\d+") == (tuple(range(8)),)
    assert all(len(near) == 1 for near in near_adapters(matrix).values())
    assert set(devices_per_adapter(matrix).values()) == {1}


def test_pairs_of_bridged_devices_are_islands_and_a_ring_is_not() -> None:
    pairs = "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X \tNV4\tSYS\tSYS\nGPU1\tNV4\t X \tSYS\tSYS\n"
    pairs += "GPU2\tSYS\tSYS\t X \tNV4\nGPU3\tSYS\tSYS\tNV4\t X \n"
    ring = pairs.replace("NV4\tSYS\tSYS", "NV4\tSYS\tNV4").replace("SYS\tSYS\t X \tNV4", "SYS\tNV4\t X \tNV4")
    ring = ring.replace("GPU1\tNV4\t X \tSYS", "GPU1\tNV4\t X \tNV4").replace("GPU3\tSYS\tSYS", "GPU3\tNV4\tSYS")
    made, around = read_matrix(pairs), read_matrix(ring)
    assert islands(given(made), r"NV\d+") == ((0, 1), (2, 3))
    assert islands(given(around), r"NV\d+") == ()


@pytest.mark.parametrize("name", MATRICES)
def test_a_matrix_that_is_cut_within_the_devices_rows_is_refused(name: str) -> None:
    lines = TEXTS[name].splitlines()
    for end in range(9):
        assert read_matrix("\n".join(lines[:end])) is None
    assert read_matrix("\n".join(lines[:9])) is not None


def test_devices_of_another_detector_match_the_catalogue() -> None:
    found = json.loads(TEXTS["detect-gpustack-h100.json"])
    (name,) = {each["name"] for each in found}
    (chip,) = (chip for chip in plugin.flagcore_chips("") if chip.has_name(name))
    assert chip.name == "H100-SXM"
    assert {each["memory"] * 2**20 for each in found} == {given(chip.memory_bytes).value}
    (topology,) = json.loads(TEXTS["topology-gpustack-h200.json"])
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
    assert bool(discover.read(f"index, name, memory.total [MiB]\n0, {name}, 65536 MiB\n").rows) == ours


def test_a_list_with_instances_names_them_and_one_without_has_the_gpus() -> None:
    gpu = "GPU {0}: NVIDIA GH200 480GB (UUID: GPU-{0})\n"
    instance = "  MIG 3g.48gb     Device  {0}: (UUID: MIG-{0})\n"
    listing = discover.read(gpu.format(0) + instance.format(0) + instance.format(1) + gpu.format(1))
    assert [(row.device.index, row.device.chip, row.device.uuid) for row in listing.rows] == [
        (1, "NVIDIA GH200 480GB", "GPU-1")
    ]
    assert ["(MIG)" in line for line in listing.left_out] == [True]
    assert not discover.read("index, name\n0, NVIDIA H100 80GB HBM3 MIG 1g.10gb\n").rows


HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 570.133.20             Driver Version: 570.133.20     CUDA Version: 12.8     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
"""
WELL = """\
|   0  NVIDIA A100-SXM4-80GB          On  |   00000000:07:00.0 Off |                    0 |
| N/A   31C    P0             62W /  400W |       4MiB /  81920MiB |      0%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+
"""
INSTANCES = """\
|   1  NVIDIA A100-SXM4-80GB          On  |   00000000:0A:00.0 Off |                   On |
| N/A   31C    P0             62W /  400W |      87MiB /  81920MiB |     N/A      Default |
|                                         |                        |              Enabled |
+-----------------------------------------+------------------------+----------------------+
| MIG devices:                                                                            |
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |                     Memory-Usage |        Vol|        Shared         |
|==================+==================================+===========+=======================|
|  1    1   0   0  |              37MiB / 40192MiB    | 42      0 |  3   0    2    0    0 |
|                  |                 0MiB / 65535MiB  |           |                       |
"""
LOST = """\
|   1  ERR!                           On  |   00000000:0A:00.0 Off |                 ERR! |
|ERR!  ERR!  ERR!            N/A /  ERR!  |  GPU is lost           |     ERR!        ERR! |
|                                         |                        |                 ERR! |
"""
FAULTY = """\
|   1  NVIDIA A100-SXM4-80GB          On  |   00000000:0B:00.0 Off |                 ERR! |
|ERR!  ERR!  ERR!            N/A /  ERR!  |   81559MiB /  81559MiB |     ERR!        ERR! |
"""
FOREIGN = """\
|   1  MetaX C500                     On  |   00000000:07:00.0 Off |                    0 |
| N/A   31C    P0             62W /  350W |       1MiB /  65536MiB |      0%      Default |
"""
UNKNOWN_ROW = "|   1  NVIDIA Z9     |   00000000:07:00.0 |  what is this  |\n"
PROCESSES = """\
| Processes:                                                                              |
|=========================================================================================|
|    0   N/A  N/A            1234      C   python 00000000:07:00.0 NVIDIA H100    4000MiB |
"""


def found(text: str) -> list[tuple[int, str, int | None]]:
    return [
        (row.device.index, row.device.chip, row.device.memory_bytes and row.device.memory_bytes >> 20)
        for row in discover.read(text).rows
    ]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (INSTANCES, "instances"),
        (LOST, "unknown format"),
        (FAULTY, "reports errors"),
        (FOREIGN, "not NVIDIA's"),
        (UNKNOWN_ROW, "unknown format"),
    ],
)
def test_a_device_that_cannot_be_used_is_left_out_and_the_reason_reported(second: str, reason: str) -> None:
    listing = discover.read(HEAD + WELL + second + PROCESSES)
    assert [row.device.index for row in listing.rows] == [0]
    (message,) = listing.left_out
    assert reason in message


def test_processes_are_not_devices() -> None:
    assert discover.read(HEAD + WELL + PROCESSES).left_out == ()


def test_a_chip_that_shares_host_memory_has_no_memory_size() -> None:
    table = """\
|   0  NVIDIA GB10                    On  |   0000000F:01:00.0 Off |                  N/A |
| N/A   38C    P8              5W /  N/A  | Not Supported          |      0%      Default |
"""
    assert found(HEAD + table) == [(0, "NVIDIA GB10", None)]


@pytest.mark.parametrize(
    ("table", "name", "mib"),
    [
        (
            "| NVIDIA-SMI 537.13    Driver Version: 537.13   CUDA Version: 12.2 |\n"
            "|   0  NVIDIA GeForce RTX 4090      WDDM  | 00000000:01:00.0  On |                  Off |\n"
            "|  0%   39C    P8              16W / 450W |   1301MiB / 24564MiB |      2%      Default |\n",
            "NVIDIA GeForce RTX 4090",
            24564,
        ),
        (
            "| NVIDIA-SMI 340.29     Driver Version: 340.29         |\n"
            "|   0  Tesla K40m          Off  | 0000:03:00.0     Off |                    0 |\n"
            "| N/A   28C    P0    62W / 235W |     55MiB / 11519MiB |      0%      Default |\n",
            "Tesla K40m",
            11519,
        ),
        (
            "| NVIDIA-SMI 470.82.01    Driver Version: 470.82.01    CUDA Version: 11.4     |\n"
            "|   0  NVIDIA A100-SXM...  On   | 00000000:07:00.0 Off |                    0 |\n"
            "| N/A   31C    P0    N/A /  N/A |      0MiB / 40536MiB |      0%      Default |\n",
            "NVIDIA A100-SXM...",
            40536,
        ),
    ],
)
def test_tables_of_other_drivers_and_systems_are_read(table: str, name: str, mib: int) -> None:
    assert found(table) == [(0, name, mib)]


def test_colours_carriage_returns_and_a_warning_before_the_table_do_not_matter() -> None:
    plain = HEAD + WELL
    coloured = "WARNING: infoROM is corrupted\r\n" + "".join(
        f"\x1b[1;32m{line}\x1b[0m\r\n" for line in plain.splitlines()
    )
    assert discover.read(coloured) == discover.read(plain)


def test_a_query_with_fields_that_are_new_and_a_lost_device_is_read_by_its_header() -> None:
    text = """\
WARNING: infoROM is corrupted at gpu 0000:0A:00.0
index, name, uuid, memory.total [MiB], power.draw [W], temperature.gpu, vbios_version, mig.mode.current
0, NVIDIA H20-3e, GPU-a, 143771 MiB, 110.12 W, 30, 96.00, Disabled
1, NVIDIA H20-3e, GPU-b, 143771, [Unknown Error], [Not Supported], 96.00, [N/A]
2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]
"""
    assert found(text) == [(0, "NVIDIA H20-3e", 143771), (1, "NVIDIA H20-3e", 143771)]
    listing = discover.read(text)
    assert listing.rows[0].reading == {"power_watts": 110.12, "temperature_celsius": 30}
    assert listing.rows[1].reading == {}
    (message,) = listing.left_out
    assert "device 2" in message


@pytest.mark.parametrize(
    "text",
    [
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "Unable to determine the device handle for GPU0000:1C:00.0: Unknown Error\n",
        'Field "foo" is not a valid field to query.\n',
        "\tGPU0\tCPU Affinity\nGPU0\t X \t0-63\n",
        "# gpu   pwr gtemp    sm   mem\n# Idx     W     C     %     %\n    0    70    31     0     0\n",
        '<?xml version="1.0" ?>\n<nvidia_smi_log>\n',
    ],
)
def test_messages_and_other_pages_are_not_devices(text: str) -> None:
    assert discover.read(text).rows == ()


def test_without_support_for_the_query_the_table_is_read() -> None:
    table = fakes.prints(TEXTS["nvidia-smi-2.txt"])
    with fakes.machine({"nvidia-smi": f'[ $# -gt 0 ] && {{ echo "not a valid field"; exit 2; }}\n{table}'}):
        assert len(DETECTOR.devices()) == 6


def test_processes_and_blocked_gpus_are_listed() -> None:
    modes = "0, GPU-a, Default\n1, GPU-b, Exclusive_Process\n2, GPU-c, Prohibited\n3, GPU-d, Exclusive_Process\n"
    processes = "GPU-a, 4711, /usr/bin/python3.11, 20992\nGPU-b, 12, [Not Found], [N/A]\n"
    script = f"""case "$1" in
--query-gpu=index,uuid,compute_mode) {fakes.prints(modes)}
;;
--query-compute-apps=*) {fakes.prints(processes)}
;;
esac"""
    with fakes.machine({"nvidia-smi": script}):
        found = DETECTOR.uses_now()
    assert found[0] == DeviceUse(processes=("4711 python3.11 (20.5 GiB)",))
    assert found[1].processes == ("12 [Not Found]",)
    assert "Exclusive_Process" in found[1].blocked
    assert "Prohibited" in found[2].blocked
    assert found[3] == DeviceUse()


def test_a_tool_that_cannot_list_processes_reports_no_use() -> None:
    table = fakes.prints(TEXTS["nvidia-smi-2.txt"])
    with fakes.machine({"nvidia-smi": table}):
        assert DETECTOR.uses_now() == {}
    with fakes.machine({"nvidia-smi": "exit 9"}):
        assert DETECTOR.uses_now() == {}
