"""Vendors' tools are asked, and their tables and matrices are read into rows and links."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from flagcore_vendorkit import machine
from flagcore_vendorkit.detection import DeviceReading, Readings, list_with
from flagcore_vendorkit.machine import query_tool, tool_output
from flagcore_vendorkit.rows import (
    Listing,
    Row,
    cells,
    near_adapters,
    parse_memory,
    parse_power,
    read_matrix,
    read_table,
    reading,
)

from flagcore.domain.chip import Device
from tests.checks import given


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
    listing = given(query_tool(lambda text: Listing(), sys.executable, "-c", code))
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


PLAIN = """\
        GPU0    GPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV4     PIX     SYS     0-31,64-95      0               N/A
GPU1    NV4      X      SYS     PXB     32-63,96-127    1               N/A
NIC0    PIX     SYS      X      SYS
NIC1    SYS     PXB     SYS      X

Legend:
"""


def test_an_underlined_header_and_carriage_returns_do_not_matter() -> None:
    lines = PLAIN.splitlines()
    underlined = "\r\n".join([f"\t\x1b[4m{lines[0].strip()}\x1b[0m", *lines[1:]])
    assert read_matrix(underlined) == read_matrix(PLAIN) is not None


@pytest.mark.parametrize(
    "names", [("mlx5_0", "mlx5_bond_0"), ("bnxt_re0", "bnxt_re1"), ("roceo1", "irdma0"), ("ib0", "NIC9")]
)
def test_adapters_may_have_custom_names(names: tuple[str, str]) -> None:
    matrix = given(read_matrix(PLAIN.replace("NIC0", names[0]).replace("NIC1", names[1])))
    assert near_adapters(matrix) == {0: (names[0],), 1: (names[1],)}


def test_a_single_device_has_a_matrix_without_links() -> None:
    matrix = given(read_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"))
    assert (matrix.devices, dict(matrix.links)) == ((0,), {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        PLAIN.replace("GPU1    NV4", "GPU1    SYS"),
        PLAIN.replace("GPU1", "MLU1"),
        PLAIN.replace("GPU1    NV4      X ", "GPU2    NV4      X "),
        "No devices were found\n",
        "GPU0\tGPU0\n",
    ],
)
def test_an_inconsistent_matrix_is_refused(text: str) -> None:
    assert read_matrix(text) is None


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
