"""Reads what ixsmi prints. The columns of its table are found by the bars: their widths differ between versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import BUS, CSV_FIELDS, MIB, Row, cells, csv_row, csv_rows, found, listed, reading, sure

TITLE = "IX-ML:"
VENDOR = "Iluvatar "

_NAME = re.compile(r"(\d+)\s+(Iluvatar [\w .-]+)")
_MEMORY = re.compile(r"(\d+)MiB / (\d+)MiB")


def parse(text: str) -> tuple[Row, ...]:
    """Return the devices of ixsmi's table, of a CSV query with a header, or of `-L`, whichever `text` is."""
    queried = (csv_row(line, place) for place, line in enumerate(csv_rows(text, (), CSV_FIELDS)))
    named = [row for row in (*queried, *listed(text)) if row and row.device.chip.startswith(VENDOR)]
    return parse_table(text) or sure(named)


def parse_table(text: str) -> tuple[Row, ...]:
    """Return the devices of ixsmi's table. A card with two chips lists two, of which the second tells the power."""
    if TITLE not in text:
        return ()
    (version,) = found(r"Driver Version:\s*([\w.]+)", text)
    return sure(_rows(text, version or ""))


def uuids(text: str) -> Mapping[int, str]:
    """Return the UUIDs of `ixsmi --query-gpu=index,uuid --format=csv,noheader`, by index."""
    lines = re.finditer(r"^\s*(\d+),\s*([\w-]+)\s*$", text, re.MULTILINE)
    return {int(line[1]): line[2] for line in lines}


def _rows(text: str, driver: str) -> Iterator[Row]:
    head: tuple[int, str, str, str | None] | None = None
    for line in text.splitlines():
        parts = cells(line)
        memory = _MEMORY.fullmatch(parts[1]) if len(parts) == 3 else None
        if head and memory:
            index, name, bus, megahertz = head
            watts, limit = found(r"(\d+)W / (\d+)W", parts[0])
            yield Row(
                device=Device(index=index, chip=name, memory_bytes=int(memory[2]) * MIB, driver=driver),
                bus=bus,
                reading=reading(
                    used_mib=memory[1],
                    watts=watts,
                    limit_watts=limit,
                    celsius=found(r"(\d+)C\b", parts[0])[0],
                    percent=found(r"(\d+)%", parts[2])[0],
                    megahertz=megahertz,
                ),
            )
        head = _head(parts)


def _head(parts: list[str]) -> tuple[int, str, str, str | None] | None:
    name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
    if name is None or not BUS.fullmatch(parts[1]):
        return None
    return int(name[1]), name[2], parts[1], found(r"(\d+)MHz", parts[2])[0]
