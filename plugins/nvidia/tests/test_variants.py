"""Other layouts, errors and languages of nvidia-smi, derived from the known output of its versions."""

import pytest
from flagcore_nvidia import smi

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
        for row in smi.read(text).rows
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
    listing = smi.read(HEAD + WELL + second + PROCESSES)
    assert [row.device.index for row in listing.rows] == [0]
    (message,) = listing.left_out
    assert reason in message


def test_processes_are_not_devices() -> None:
    assert smi.read(HEAD + WELL + PROCESSES).left_out == ()


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
    assert smi.read(coloured) == smi.read(plain)


def test_a_query_with_fields_that_are_new_and_a_lost_device_is_read_by_its_header() -> None:
    text = """\
WARNING: infoROM is corrupted at gpu 0000:0A:00.0
index, name, uuid, memory.total [MiB], power.draw [W], temperature.gpu, vbios_version, mig.mode.current
0, NVIDIA H20-3e, GPU-a, 143771 MiB, 110.12 W, 30, 96.00, Disabled
1, NVIDIA H20-3e, GPU-b, 143771, [Unknown Error], [Not Supported], 96.00, [N/A]
2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]
"""
    assert found(text) == [(0, "NVIDIA H20-3e", 143771), (1, "NVIDIA H20-3e", 143771)]
    listing = smi.read(text)
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
    assert smi.read(text).rows == ()
