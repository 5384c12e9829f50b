"""Checks of mthreads-gmi transcripts (tests/smi), in addition to the kit's checks."""

from pathlib import Path

from flagcore_mthreads import discover, smi
from flagcore_testing import fakes
from flagcore_testing.package import saved_outputs

TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_readings_have_memory_temperature_and_load() -> None:
    row = smi.read(TEXTS["mthreads-gmi-1.txt"]).rows[0]
    assert row.reading == {"memory_used_bytes": 66817 << 20, "temperature_celsius": 57, "utilization_share": 0.63}


def test_a_virtual_gpu_is_left_out() -> None:
    listed = smi.read(TEXTS["mthreads-gmi-3.txt"])
    assert [row.device.index for row in listed.rows] == [0, 1]
    assert listed.left_out == ("GPU 2 (MTT S3000) is a part of another: MPC Instance",)


def test_processes_are_listed_by_device() -> None:
    assert smi.processes(TEXTS["mthreads-gmi-2.txt"]) == {0: ("1123 /usr/lib/xorg/Xorg (0.1 GiB)",)}
    assert smi.processes(TEXTS["mthreads-gmi-3.txt"]) == {}
    with fakes.machine({"mthreads-gmi": fakes.prints(TEXTS["mthreads-gmi-1.txt"])}):
        uses = discover.DETECTOR.uses_now()
    assert uses[1].processes == ("20482 VLLM::Worker_TP1 (63.7 GiB)",)
