"""Reads what mx-smi prints. The same tool is ht-smi on machines that are sold under another name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import BUS, MIB, Row, cells, found, reading, sure

TITLES = ("MetaX System Management Interface", "Mars System Management Interface")
"""Another vendor's tool is named mx-smi too (Moffett's), so the title is asked for."""

_NAME = re.compile(r"(\d+)\s+((?:MetaX |MX|Mars )[\w-]+)(?:\s+(?:On|Off))?")
_MEMORY = re.compile(r"(\d+)/(\d+) MiB")


def is_metax(text: str) -> bool:
    """Return whether mx-smi or its rebranded twin printed `text`."""
    return any(title in text for title in TITLES)


def parse(text: str) -> tuple[Row, ...]:
    """Return the devices of mx-smi's table, in any of its layouts. A dead device has no memory line and is left out.

    Up to 2.2.4 a line starts with the GPU's number; from 2.2.9 on with the board's, and the GPU's comes second. A
    line that was cut short tells nothing. `-L` tells no memory.
    """
    if not is_metax(text):
        return _listed(text)
    (version,) = found(r"Kernel Mode Driver Version:\s*([\w.]+)", text)
    return sure(_rows(text, version or ""))


def uuids(text: str) -> Mapping[int, str]:
    """Return the UUIDs that `mx-smi -L` lists, by index."""
    lines = re.finditer(r"^GPU#(\d+)\s+.*\(UUID: ([\w-]+)\)\s*$", text, re.MULTILINE)
    return {int(line[1]): line[2] for line in lines}


def _listed(text: str) -> tuple[Row, ...]:
    pattern = r"^GPU#(\d+)\s+((?:MetaX |MX|Mars )[\w-]+)\s+(\S+)\s+Available \(UUID: ([\w-]+)\)\s*$"
    lines = re.finditer(pattern, text, re.MULTILINE)
    return sure(Row(device=Device(index=int(line[1]), chip=line[2], uuid=line[4]), bus=line[3]) for line in lines)


def _rows(text: str, driver: str) -> Iterator[Row]:
    head: tuple[int, str, str, str | None] | None = None
    for line in text.splitlines():
        parts = cells(line)
        if head and (memory := _memory(parts)):
            index, name, bus, percent = head
            watts, limit = found(r"(\d+)W(?: / (\d+)W)?", line)
            used, total = memory
            yield Row(
                device=Device(index=index, chip=name, memory_bytes=int(total) * MIB, driver=driver),
                bus=bus,
                reading=reading(
                    used_mib=used,
                    watts=watts,
                    limit_watts=limit,
                    celsius=found(r"(\d+)C\b", line)[0],
                    percent=percent,
                ),
            )
        head = _head(parts)


def _head(parts: list[str]) -> tuple[int, str, str, str | None] | None:
    name = _NAME.fullmatch(parts[0]) if parts else None
    bus = next((place for place, part in enumerate(parts) if BUS.fullmatch(part)), None)
    if name is None or bus is None:
        return None
    gpu = re.match(r"\d+\b", parts[1]) if bus > 1 else None
    (percent,) = found(r"(\d+)%", parts[bus + 1]) if bus + 1 < len(parts) else (None,)
    return int(gpu[0] if gpu else name[1]), name[2], parts[bus], percent


def _memory(parts: list[str]) -> tuple[str, str] | None:
    match = next((match for part in parts if (match := _MEMORY.fullmatch(part))), None)
    return (match[1], match[2]) if match else None
