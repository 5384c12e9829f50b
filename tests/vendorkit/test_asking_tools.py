"""Vendors' tools are asked, and what their devices are."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from flagcore.domain.chip import Device
from flagcore.vendorkit import machine
from flagcore.vendorkit.detection import DeviceReading, Readings, list_with
from flagcore.vendorkit.machine import query_tool
from flagcore.vendorkit.rows import Listing, Row, cells

UNKNOWN = "lists no device in a known format"
TWO = Listing(tuple(Row(device=Device(index=index, chip="A1")) for index in (0, 1)))


@pytest.fixture(autouse=True)
def _own_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def listing_of(tmp_path: Path, script: str, listing: Listing = TWO, seconds: float = 10) -> Listing | None:
    (tmp_path / "acme-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "acme-smi").chmod(0o755)
    return query_tool(lambda text: listing if "table" in text else Listing(), "acme-smi", timeout_seconds=seconds)


def test_a_missing_tool_lists_no_devices() -> None:
    assert query_tool(lambda _: TWO, "no-such-tool-anywhere") is None


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Failed: old driver'; exit 18", "failed with exit status 18: Failed: old driver"),
        ("echo 'Failed: old driver' >&2; exit 18", "failed with exit status 18: Failed: old driver"),
        ("printf '\\n+----+\\n\\033[1m  a  new   layout\\033[0m\\n'", f"{UNKNOWN}; it prints: a new layout"),
        ("sleep 30", "did not answer within 0.3 s and was killed"),
    ],
)
def test_a_tool_that_lists_no_device_is_reported_with_the_reason(tmp_path: Path, script: str, reason: str) -> None:
    found = listing_of(tmp_path, script, seconds=0.3 if script == "sleep 30" else 10)
    assert found == Listing(left_out=(f"acme-smi {reason}",))


def test_a_tool_that_fails_after_it_listed_devices_is_believed(tmp_path: Path) -> None:
    assert listing_of(tmp_path, "echo table; exit 14") == TWO


def test_omissions_of_a_table_are_reported_with_the_tools_name(tmp_path: Path) -> None:
    message = listing_of(tmp_path, "echo table", Listing(TWO.rows, ("device 2 is lost",)))
    assert message == Listing(TWO.rows, ("acme-smi: device 2 is lost",))


def test_a_tool_may_have_arguments_and_a_plugin_its_own_reader_of_processes(tmp_path: Path) -> None:
    listing_of(tmp_path, '[ "$1" = info ] && echo table')

    def read(text: str) -> Listing:
        return TWO if "table" in text else Listing()

    assert list_with(read, "acme-smi", "acme-smi info")(10) == TWO
    rows = list_with(read, "acme-smi info", processes=lambda _: {1: ("4711 python3",)})(10).rows
    assert [row.use.processes for row in rows] == [(), ("4711 python3",)]


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
