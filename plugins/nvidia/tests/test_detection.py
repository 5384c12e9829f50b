"""Devices that the tool lists; the kit reads the transcripts in `smi`."""

from pathlib import Path

from flagcore_nvidia.discover import DETECTOR
from flagcore_testing import fakes

from flagcore.domain.chip import DeviceUse

QUERY = "".join(f"{i}, NVIDIA H200, 143771, 570.2, GPU-{i}abcdef, 0x233510DE, Disabled\n" for i in range(4))


def test_without_support_for_the_query_the_table_is_read() -> None:
    table = fakes.prints((Path(__file__).parent / "smi/nvidia-smi-2.txt").read_text("utf-8"))
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
    table = fakes.prints((Path(__file__).parent / "smi/nvidia-smi-2.txt").read_text("utf-8"))
    with fakes.machine({"nvidia-smi": table}):
        assert DETECTOR.uses_now() == {}
    with fakes.machine({"nvidia-smi": "exit 9"}):
        assert DETECTOR.uses_now() == {}
