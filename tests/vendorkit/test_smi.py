"""Tables of the vendors' tools, read into rows."""

import sys
import time
from pathlib import Path

import pytest

from flagcore.domain.chip import Device
from flagcore.vendorkit.machine import query_tool, tool_output, visible
from flagcore.vendorkit.rows import Listing, Row, parse_memory, parse_power, read_table, reading

FOUR = tuple(Device(index=index, chip="X1", uuid=f"UUID-{index}{index}{index}") for index in range(4))


def test_missing_failing_and_hanging_tools_give_nothing() -> None:
    assert tool_output("no-such-tool-anywhere") is None
    assert tool_output(sys.executable, "-c", "print('half'); raise SystemExit(1)") is None
    start = time.monotonic()
    assert tool_output(sys.executable, "-c", "import time; time.sleep(60)", timeout_seconds=0.5) is None
    assert time.monotonic() - start < 10


def test_a_hanging_wrapper_is_ended_with_its_child(tmp_path: Path) -> None:
    note = tmp_path / "note"
    child = f"sleep 2; echo alive > {note}"
    assert tool_output("sh", "-c", f"({child}); true", timeout_seconds=0.3) is None
    time.sleep(2.2)
    assert not note.exists()


def test_tool_that_cannot_be_executed_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brokensmi").write_bytes(b"\x7fELF not really")
    (tmp_path / "brokensmi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool_output("brokensmi") is None


def test_invalid_bytes_are_replaced() -> None:
    assert tool_output(sys.executable, "-c", "import os; os.write(1, b'ok \\xff')") == "ok \ufffd"


@pytest.mark.parametrize(
    ("setting", "indices"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("", []), ("1,9,2", [1]), ("-1", []), ("UUID-3", [3]), ("all", [])],
)
def test_only_visible_devices_count(monkeypatch: pytest.MonkeyPatch, setting: str | None, indices: list[int]) -> None:
    monkeypatch.delenv("X_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("X_VISIBLE_DEVICES", setting)
    assert [device.index for device in visible(FOUR, "X_VISIBLE_DEVICES")] == indices


@pytest.mark.parametrize(
    ("printed", "first"),
    [
        ("0:07:00.0 is lost\n", "0:07:00.0 is lost"),
        ("00:07:00.0 is lost\n", "00:07:00.0 is lost"),
        ("Fri Dec 20 11:14:29 2024\nno device\n", "no device"),
        ("[07:58:46.633] starting\nno device\n", "no device"),
    ],
)
def test_an_address_on_the_bus_is_no_time_stamp(printed: str, first: str) -> None:
    code = f"import sys; print({printed!r}, end=''); sys.exit(3)"
    listing = query_tool(lambda text: Listing(), sys.executable, "-c", code)
    assert listing is not None
    assert listing.left_out[0].endswith(f"failed with exit status 3: {first}")


MIB = 2**20


@pytest.mark.parametrize(
    ("cell", "watts"),
    [
        ("P0   70W / 700W", ("70", "700")),
        ("61 / 450 W", ("61", "450")),
        ("61/450W", ("61", "450")),
        ("P0 / 450W", ("450", None)),
        ("N/A / 450W", (None, "450")),
        ("45C  61W", ("61", None)),
        ("826/65536 MiB", (None, None)),
    ],
)
def test_the_unit_of_power_may_be_reported_once_for_use_and_limit(
    cell: str, watts: tuple[str | None, str | None]
) -> None:
    assert parse_power(cell) == watts


@pytest.mark.parametrize(
    ("watts", "figures"), [("61.5", {"power_watts": 61.5}), ("65535", {}), ("N/A", {}), (None, {})]
)
def test_a_sensor_that_the_driver_cannot_read_has_no_figure(watts: str | None, figures: dict[str, float]) -> None:
    assert reading(watts=watts) == figures


@pytest.mark.parametrize("cell", ["826/65536 MiB", "826MiB / 65536MiB", "826 / 65536MiB"])
def test_the_unit_of_memory_may_be_reported_once_for_used_and_total(cell: str) -> None:
    assert parse_memory(cell) == (826 * MIB, 65536 * MIB)


def test_the_lines_below_a_device_are_no_unknown_devices() -> None:
    def head(parts: list[str]) -> str | None:
        return parts[0] if parts[0].startswith("GPU") else None

    table = "| GPU 0 | on |\n| 0 more | 0000:03:00.0 | 1 |\n| 1 more | 0000:05:00.0 | 1 |\n"
    row = Row(device=Device(index=0, chip="A1"))
    assert read_table(table, head, lambda *_: row, lines_per_device=3).left_out == ()
    assert len(read_table(table, head, lambda *_: row).left_out) == 1
