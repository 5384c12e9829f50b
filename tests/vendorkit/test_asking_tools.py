"""Reports about a management tool that fails, hangs, or prints unknown text."""

from pathlib import Path

import pytest

from flagcore.domain.chip import Device
from flagcore.vendorkit.detection import list_with
from flagcore.vendorkit.machine import query_tool
from flagcore.vendorkit.rows import Listing, Row

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


@pytest.mark.parametrize("to", ["", " >&2"])
def test_the_error_of_a_failing_tool_is_reported_with_its_exit_status(tmp_path: Path, to: str) -> None:
    message = listing_of(tmp_path, f"echo 'Failed to initialize: version mismatch'{to}; exit 18")
    assert message == Listing(left_out=("acme-smi failed with exit status 18: Failed to initialize: version mismatch",))


def test_a_tool_that_fails_after_it_listed_devices_is_believed(tmp_path: Path) -> None:
    assert listing_of(tmp_path, "echo table; exit 14") == TWO


def test_unknown_text_is_quoted_by_its_first_words(tmp_path: Path) -> None:
    message = listing_of(tmp_path, "printf '\\n+----+\\n\\033[1m  a  new   layout\\033[0m\\n'")
    assert message == Listing(left_out=("acme-smi lists no device in a known format; it prints: a new layout",))


def test_a_tool_that_hangs_is_reported(tmp_path: Path) -> None:
    message = listing_of(tmp_path, "sleep 30", seconds=0.3)
    assert message == Listing(left_out=("acme-smi did not answer within 0.3 s and was killed",))


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
