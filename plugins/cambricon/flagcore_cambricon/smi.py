"""Reads what cnmon prints, of versions 4 and 5."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flagcore.domain.chip import Device
from flagcore_cambricon.kit.rows import BUS, MIB, Row, cells, found, reading, sure

TITLE = re.compile(r"\bCNMON v\d")

_NAME = re.compile(r"(\d+)\s+(\S+)\s+(MLU\w+(?:-\w+)?)\s+v[\d.]+")
_MEMORY = re.compile(r"(\d+) MiB/\s*(\d+) MiB")


def parse(text: str) -> tuple[Row, ...]:
    """Return the devices of cnmon's table: card, virtual function, name and firmware, then memory in MiB.

    A device whose memory is not a number, or that is a virtual function of another, is left out. Version 4 tells no
    PCI address, and the driver in each line.
    """
    if not TITLE.search(text):
        return ()
    (version,) = found(r"Driver\s+v(\d[\d.]*)", text)
    return sure(_rows(text, version or ""))


def _rows(text: str, driver: str) -> Iterator[Row]:
    head: tuple[int, str, str, str, str | None] | None = None
    for line in text.splitlines():
        parts = cells(line)
        memory = _MEMORY.fullmatch(parts[1]) if len(parts) == 3 else None
        if head and memory:
            index, name, bus, own, percent = head
            watts, limit = found(r"(\d+) W/\s*(\d+) W", parts[0])
            yield Row(
                device=Device(index=index, chip=name, memory_bytes=int(memory[2]) * MIB, driver=driver or own),
                bus=bus,
                reading=reading(
                    used_mib=memory[1],
                    watts=watts,
                    limit_watts=limit,
                    celsius=found(r"(\d+)C\b", parts[0])[0],
                    percent=percent,
                ),
            )
        head = _head(parts)


def _head(parts: list[str]) -> tuple[int, str, str, str, str | None] | None:
    name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
    if name is None or name[2] != "/":
        return None
    bus = parts[1] if BUS.fullmatch(parts[1]) else ""
    (driver,) = found(r"\bv(\d[\d.]*)$", parts[1])
    return int(name[1]), name[3], bus, driver or "", found(r"(\d+)%", parts[2])[0]
