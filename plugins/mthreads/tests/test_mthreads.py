"""Checks of mthreads-gmi transcripts (tests/smi), in addition to the kit's checks."""

from pathlib import Path

import pytest
from flagcore_mthreads import discover, hooks
from flagcore_testing import PluginConformance, fakes
from flagcore_testing.package import saved_outputs


class TestMthreads(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_processes_are_listed_by_device() -> None:
    assert discover.processes(TEXTS["mthreads-gmi-2.txt"]) == {0: ("1123 /usr/lib/xorg/Xorg (0.1 GiB)",)}
    assert discover.processes(TEXTS["mthreads-gmi-3.txt"]) == {}
    with fakes.machine({"mthreads-gmi": fakes.prints(TEXTS["mthreads-gmi-1.txt"])}):
        uses = discover.DETECTOR.uses_now()
    assert uses[1].processes == ("20482 VLLM::Worker_TP1 (63.7 GiB)",)
