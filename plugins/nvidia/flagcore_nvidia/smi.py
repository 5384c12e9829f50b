"""Reads what nvidia-smi prints: CSV queries, with a header or with the fields that were asked for, and the table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from flagcore.domain.chip import Device
from flagcore_nvidia.kit.rows import BUS, MIB, Row, cells, found, reading, sure

FIELDS = ("index", "name", "memory.total", "driver_version", "uuid", "pci.device_id")
READ_FIELDS = (
    *FIELDS,
    *("memory.used", "power.draw", "power.limit", "temperature.gpu", "utilization.gpu", "clocks.sm"),
)
TITLE = "NVIDIA-SMI"
PCI_VENDOR = "10DE"
"""The last four digits of pci.device_id. Other vendors' drivers bring an nvidia-smi that answers for their devices."""

_HEADER = re.compile(r"[a-z][\w.]*(?: \[[^\]]+\])?")
_NAME = re.compile(r"(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)")
_MEMORY = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")


def parse_csv(text: str, fields: Sequence[str] = FIELDS) -> tuple[Row, ...]:
    """Return the devices of a CSV query for `fields`, or for those that its first line names.

    Units after the numbers do not matter. A line with another number of fields (a warning, a cut one) is skipped, and
    so is a device of another vendor. Without an index the lines are counted.
    """
    rows = []
    lines = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    if lines and all(_HEADER.fullmatch(word) for word in lines[0]) and {"index", "name"} & set(lines[0]):
        fields, lines = [word.split(" [")[0] for word in lines[0]], lines[1:]
    for place, words in enumerate(lines):
        if len(words) == len(fields) and (row := _row(dict(zip(fields, words, strict=True)), place)):
            rows.append(row)
    return sure(rows)


def parse_table(text: str) -> tuple[Row, ...]:
    """Return the devices of the table without arguments, which shortens long names."""
    if TITLE not in text:
        return ()
    (version,) = found(r"Driver Version:\s*([\w.]+)", text)
    return sure(_table(text, version or ""))


def _row(given: Mapping[str, str], place: int) -> Row | None:
    index, total = given.get("index", str(place)), _number(given.get("memory.total", ""))
    vendor = given.get("pci.device_id", PCI_VENDOR)
    if not index.isdigit() or not given.get("name") or not vendor.upper().endswith(PCI_VENDOR):
        return None
    return Row(
        device=Device(
            index=int(index),
            chip=given["name"],
            memory_bytes=int(float(total) * MIB) if total else None,  # [N/A] where the GPU shares the host's memory
            driver=given.get("driver_version", ""),
            uuid=given.get("uuid", ""),
        ),
        bus=given.get("pci.bus_id", ""),
        reading=reading(
            used_mib=_number(given.get("memory.used", "")),
            watts=_number(given.get("power.draw", "")),
            limit_watts=_number(given.get("power.limit", "")),
            celsius=_number(given.get("temperature.gpu", "")),
            percent=_number(given.get("utilization.gpu", "")),
            megahertz=_number(given.get("clocks.sm", "")),
        ),
    )


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


def _number(word: str) -> str | None:
    return found(r"^(\d+(?:\.\d+)?)(?: \S+)?$", word)[0]
