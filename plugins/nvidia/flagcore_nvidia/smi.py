"""Reads what nvidia-smi prints: CSV queries, with a header or with the fields that were asked for, and the table."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import (
    BUS,
    CSV_FIELDS,
    MIB,
    Row,
    cells,
    csv_row,
    csv_rows,
    found,
    listed,
    reading,
    sure,
)

LOG = logging.getLogger(__name__)
FIELDS = ("index", "name", "memory.total", "driver_version", "uuid", "pci.device_id", "mig.mode.current")
READ_FIELDS = (
    *FIELDS,
    *("memory.used", "power.draw", "power.limit", "temperature.gpu", "utilization.gpu", "clocks.sm"),
)
TITLE = "NVIDIA-SMI"
PCI_VENDOR = "10DE"
"""The last four digits of pci.device_id. Other vendors' drivers bring an nvidia-smi that answers for their devices."""

_NVIDIA = re.compile(r"(NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID)\b|[AHLTVP]\d{1,3}S?\b")
_NAME = re.compile(r"(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)")
_MEMORY = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")


def parse(text: str, fields: Sequence[str] = FIELDS) -> tuple[Row, ...]:
    """Return the devices of a CSV query for `fields`, of the table, or of `-L`, whichever `text` is."""
    return parse_csv(text, fields) or parse_table(text) or sure(row for row in listed(text) if _sounds(row))


def parse_csv(text: str, fields: Sequence[str] = FIELDS) -> tuple[Row, ...]:
    """Return the devices of a CSV query for `fields`, or for those that its first line names.

    A device of another vendor is left out: by its PCI id or, where that was not asked for, by its name. So is one that
    is cut into instances (MIG), and that is told: its memory is not one process's.
    """
    lines = csv_rows(text, fields, CSV_FIELDS)
    rows = [(line, csv_row(line, place)) for place, line in enumerate(lines)]
    return sure(row for line, row in rows if row and _ours(line, row))


def parse_table(text: str) -> tuple[Row, ...]:
    """Return the devices of the table without arguments, which shortens long names."""
    if TITLE not in text:
        return ()
    (version,) = found(r"Driver Version:\s*([\w.]+)", text)
    return sure(_table(text, version or ""))


def _table(text: str, driver: str) -> Iterator[Row]:
    head: tuple[int, str, str] | None = None
    for line in text.splitlines():
        parts = cells(line)
        memory = _MEMORY.fullmatch(parts[1]) if len(parts) == 3 else None
        if head and memory:
            index, name, bus = head
            watts, limit = found(r"(\d+)W /\s*(\d+)W", parts[0])
            yield Row(
                device=Device(index=index, chip=name, memory_bytes=int(memory[2]) * MIB, driver=driver),
                bus=bus,
                reading=reading(
                    used_mib=memory[1],
                    watts=watts,
                    limit_watts=limit,
                    celsius=found(r"(\d+)C\b", parts[0])[0],
                    percent=found(r"(\d+)%", parts[2])[0],
                ),
            )
        head = _head(parts)


def _head(parts: list[str]) -> tuple[int, str, str] | None:
    name = _NAME.fullmatch(parts[0]) if len(parts) == 3 else None
    bus = BUS.match(parts[1]) if len(parts) == 3 else None
    return (int(name[1]), name[2], bus[0]) if name and bus else None


def _ours(line: Mapping[str, str], row: Row) -> bool:
    if line.get("mig.mode.current") == "Enabled":
        LOG.warning("GPU %d is cut into instances (MIG) and left out", row.device.index)
        return False
    vendor = line.get("pci.device_id")
    return _sounds(row) if vendor is None else vendor.upper().endswith(PCI_VENDOR)


def _sounds(row: Row) -> bool:
    return _NVIDIA.match(row.device.chip) is not None
