"""Checks of hy-smi transcripts (tests/smi), in addition to the kit's checks."""

from pathlib import Path

import pytest
from flagcore_hygon import discover, hooks
from flagcore_hygon.discover import DETECTOR
from flagcore_testing import PluginConformance
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.machine import TorchReport

from flagcore.domain.chip import Device


class TestHygon(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_older_releases_call_the_device_dcu_and_print_a_hexadecimal_id() -> None:
    row = discover.read(TEXTS["hy-smi-2.json"]).rows[3]
    assert row.device.uuid == "GPU-7100f95cee823044"
    assert (row.reading["utilization_share"], row.reading["temperature_celsius"]) == (0, 61)


def test_bytes_are_read_too() -> None:
    older = TEXTS["hy-smi-2.json"].replace("Memory (MiB)", "Memory (B)").replace('"65520"', '"68702699520"')
    assert discover.read(older).rows[0].device.memory_bytes == 65520 << 20


@pytest.mark.parametrize(
    ("version", "name", "trusted"),
    [
        ("2.9.0+das.opt1.dtk2604", "BW", True),
        ("2.9.0", "K100_AI", True),
        ("2.9.1+rocm7.2", "AMD Instinct MI300X", False),
        ("2.11.0+cu130", "NVIDIA H200", False),
    ],
)
def test_torch_of_another_vendor_is_not_trusted(version: str, name: str, trusted: bool) -> None:
    device = Device(index=0, chip=name, memory_bytes=64 << 30)
    assert DETECTOR.trusts(TorchReport(version=version, attributes=frozenset(), devices=(device,))) == trusted
