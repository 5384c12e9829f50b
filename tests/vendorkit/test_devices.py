"""What a tool prints of devices, and how often it is asked."""

from types import SimpleNamespace

import pytest

from flagcore.domain.chip import Device
from flagcore.vendorkit import machine
from flagcore.vendorkit.detection import DeviceReading, Readings
from flagcore.vendorkit.rows import Listing, Row, cells


def test_a_line_without_its_last_bar_has_no_cells() -> None:
    assert cells("| 0  A1 | on |") == ["0  A1", "on"]
    assert cells("| 0  A1 | o") == cells("|") == cells("+---+") == cells("") == []


def test_all_devices_share_one_run_of_the_tool_until_it_is_old() -> None:
    answers = [Listing((row(0, 1.0), row(1, 2.0))), Listing((row(0, 3.0),))]
    read = SimpleNamespace(rows=lambda: answers.pop(0).rows, uses_now=dict)
    readings = Readings(read)  # type: ignore[arg-type]
    assert [DeviceReading(readings, index).sample()["power_watts"] for index in (0, 1, 0)] == [1.0, 2.0, 1.0]
    readings.rows._until = 0.0
    assert DeviceReading(readings, 0).sample() == {"power_watts": 3.0}
    with pytest.raises(LookupError, match="device 1"):
        DeviceReading(readings, 1).sample()


def row(index: int, watts: float) -> Row:
    return Row(device=Device(index=index, chip="A1"), reading={"power_watts": watts})


@pytest.mark.parametrize(
    "printed", ["", "{", "{}", '{"version": 1}', "[1, 2]", '{"version": "2", "attributes": 3}', "\x00"]
)
def test_missing_torch_output_is_not_read(printed: str) -> None:
    assert machine.read_torch(printed) is None
