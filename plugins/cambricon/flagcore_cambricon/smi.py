"""Reads what cnmon prints: its table and `cnmon info`, as versions 4 and 5 do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import BUS, MIB, Row, cells, found, reading, sure

TITLE = re.compile(r"\bCNMON v\d")

_NAME = re.compile(r"(\d+)\s+(\S+)\s+(MLU[\w-]+)(?:\s+\S+)?")
_MEMORY = re.compile(r"(\d+) MiB/\s*(\d+) MiB")


def parse(text: str) -> tuple[Row, ...]:
    """Return the devices of cnmon's table: card, virtual function, name and firmware, then memory in MiB.

    A device whose memory is not a number, or that is a virtual function of another, is left out. Version 4 tells no
    PCI address, and the driver in each line.
    """
    if not TITLE.search(text):
        return ()
    (version,) = found(r"Driver\s+v(\d[\d.]*)", text)
    return sure(_rows(text, version or "")) or sure(_blocks(text))


def _blocks(text: str) -> Iterator[Row]:
    """Yield the devices of `cnmon info`: a block a card, in which sections are indented."""
    for index, block in re.findall(r"^Card (\d+)\n((?:[ \t]+.*\n?)*)", text, re.MULTILINE):
        (name,) = found(r"Product Name\s*:\s*(MLU[\w-]+)", block)
        (total,) = found(r"Physical Memory Usage\s*:\s*\n\s*Total\s*:\s*(\d+) MiB", block)
        if name and total:
            yield Row(
                device=Device(
                    index=int(index),
                    chip=name,
                    memory_bytes=int(total) * MIB,
                    driver=found(r"Driver\s*:\s*v(\d[\d.]*)", block)[0] or "",
                ),
                reading=reading(
                    used_mib=found(r"Total\s*:\s*\d+ MiB\s*\n\s*Used\s*:\s*(\d+) MiB", block)[0],
                    watts=found(r"Power\s*:\s*\n\s*Usage\s*:\s*(\d+(?:\.\d+)?) W", block)[0],
                    celsius=found(r"Temperature\s*:\s*\n\s*(?:Board|Chip)\s*:\s*(\d+) C", block)[0],
                    percent=found(r"MLU Average\s*:\s*(\d+) %", block)[0],
                ),
            )


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
