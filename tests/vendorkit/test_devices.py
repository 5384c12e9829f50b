"""What a tool prints of devices, and how often it is asked."""

import time

import pytest

from flagcore.domain.chip import Device
from flagcore.vendorkit import machine
from flagcore.vendorkit.detection import DeviceReading, Shared
from flagcore.vendorkit.rows import Row, cells


def test_a_line_without_its_last_bar_has_no_cells() -> None:
    assert cells("| 0  A1 | on |") == ["0  A1", "on"]
    assert cells("| 0  A1 | o") == cells("|") == cells("+---+") == cells("") == []


def test_all_devices_share_one_run_of_the_tool_per_second() -> None:
    calls = []

    def read() -> dict[int, Row]:
        calls.append(time.monotonic())
        rows = (Row(device=Device(index=i, chip="A1"), reading={"power_watts": float(len(calls))}) for i in (0, 1))
        return {row.device.index: row for row in rows}

    table = Shared(read, fresh_seconds=60)
    assert [DeviceReading(table, index).sample() for index in (0, 1, 0)] == [{"power_watts": 1.0}] * 3
    assert len(calls) == 1


def test_an_old_answer_is_requested_again_and_a_lost_device_is_an_error() -> None:
    answers: list[dict[int, Row]] = [{0: Row(device=Device(index=0, chip="A1"), reading={})}, {}]
    table = Shared(lambda: answers.pop(0), fresh_seconds=0)
    assert DeviceReading(table, 0).sample() == {}
    with pytest.raises(LookupError, match="device 0"):
        DeviceReading(table, 0).sample()


@pytest.mark.parametrize(
    "printed", ["", "{", "{}", '{"version": 1}', "[1, 2]", '{"version": "2", "attributes": 3}', "\x00"]
)
def test_missing_torch_output_is_not_read(printed: str) -> None:
    assert machine.read_torch(printed) is None
