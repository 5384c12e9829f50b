"""Checks of efsmi transcripts (tests/smi), in addition to the kit's checks."""

from pathlib import Path

import pytest
from flagcore_enflame import discover, hooks
from flagcore_testing import PluginConformance
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import islands, read_matrix


class TestEnflame(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_memory_in_use_includes_the_reserved_memory() -> None:
    idle = discover.read(TEXTS["efsmi-1.txt"]).rows[1]
    assert idle.reading["memory_used_bytes"] == 1129 << 20


def test_links_show_which_devices_share_bridges() -> None:
    matrix = read_matrix(TEXTS["efsmi-3.txt"])
    assert matrix is not None
    assert islands(matrix, "PXB") == ((0, 1), (2, 3))
