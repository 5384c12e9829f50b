"""Devices that the tool lists; the kit reads the transcripts in `smi`."""

from pathlib import Path

from flagcore_nvidia.discover import DETECTOR

from flagcore.testing import fakes

QUERY = "".join(f"{i}, NVIDIA H200, 143771, 570.2, GPU-{i}abcdef, 0x233510DE, Disabled\n" for i in range(4))


def test_devices_are_made_visible_by_uuid_too() -> None:
    with fakes.machine({"nvidia-smi": fakes.prints(QUERY)}, CUDA_VISIBLE_DEVICES="GPU-3abc,1"):
        assert [device.index for device in DETECTOR.devices()] == [3, 1]


def test_without_support_for_the_query_the_table_is_read() -> None:
    table = fakes.prints((Path(__file__).parent / "smi/nvidia-smi-2.txt").read_text("utf-8"))
    with fakes.machine({"nvidia-smi": f'[ $# -gt 0 ] && {{ echo "not a valid field"; exit 2; }}\n{table}'}):
        assert len(DETECTOR.devices()) == 6


def test_a_reading_has_the_fields_of_the_query() -> None:
    line = "1, NVIDIA H200, 143771, 570.2, GPU-1a, 0x233510DE, Disabled, 1024, 412.50, 700.00, 61, 97, 1980\n"
    with fakes.machine({"nvidia-smi": fakes.prints(line)}):
        (row,) = DETECTOR.rows()
    assert row.reading["memory_used_bytes"] == 1024 * 2**20
