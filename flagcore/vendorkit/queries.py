"""Reads the output of queries in the format that most management tools share: CSV, `-q` and `-L`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import BUS, UNITS, Row, reading, search

OTHER_NAMES = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "gpu_serial": "serial"}

_HEADER = re.compile(r"([a-z][a-z0-9_.]*)(?: \[([\w%/]+)\])?")
_BLOCK = {
    "Product Name": "name",
    "GPU UUID": "uuid",
    "PCI.Device Id": "pci.device_id",
    "MIG Mode.Current": "mig.mode.current",
    "FB Memory Usage.Total": "memory.total",
    "FB Memory Usage.Used": "memory.used",
    "Utilization.Gpu": "utilization.gpu",
    "Utilization.GPU": "utilization.gpu",
    "Temperature.GPU Current Temp": "temperature.gpu",
    "Power Readings.Power Draw": "power.draw",
    "GPU Power Readings.Power Draw": "power.draw",
    "GPU Power Readings.Instantaneous Power Draw": "power.draw",
    "Power Readings.Power Limit": "power.limit",
    "GPU Power Readings.Current Power Limit": "power.limit",
    "Clocks.SM": "clocks.sm",
}
"""The CSV field of each line of `-q`, with its section."""


def csv_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Return the lines of a CSV query by field: `fields`, or those of a header line with names and units.

    A line with another number of fields is skipped. The header's units are added to the numbers.
    """
    lines = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    units: Sequence[str | None] = [None] * len(fields)
    for at, words in enumerate(lines):
        header = [match for word in words if (match := _HEADER.fullmatch(word))]
        names = [OTHER_NAMES.get(match[1], match[1]) for match in header]
        if len(header) == len(words) > 1 and "name" in names:
            fields, units, lines = names, [match[2] for match in header], lines[at + 1 :]
            break
    return [
        {field: _with_unit(word, unit) for field, word, unit in zip(fields, words, units, strict=True)}
        for words in lines
        if len(words) == len(fields)
    ]


def read_details(text: str) -> list[dict[str, str]]:
    """Return the devices of `-q`, one block each below its PCI address, by the fields of a CSV query."""
    (driver,) = search(r"(?m)^Driver Version\s*:\s*([\w.]+)", text)
    blocks: list[dict[str, str]] = []
    section = ""
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(" :"))
        start = re.fullmatch(rf"GPU ({BUS.pattern})", line.strip())
        if start:
            blocks.append({"index": str(len(blocks)), "pci.bus_id": start[1], "driver_version": driver or ""})
        elif blocks and key and not colon:
            section = key
        elif blocks and colon:
            if len(line) - len(line.lstrip()) <= 4:
                section = ""
            field = _BLOCK.get(f"{section}.{key}" if section else key)
            if field:
                blocks[-1].setdefault(field, value)
    return blocks


def csv_row(fields: Mapping[str, str], place: int) -> Row | str:
    """Return the device of one line of a CSV query, or why it cannot be used.

    Numbers without a unit have the usual unit. `place` is the index if the line has none.
    """
    index, name = fields.get("index", str(place)), fields.get("name", "")
    if not index.isdigit() or not name or name.startswith("[") or "ERR!" in name:
        return f"device {index} has no name: {', '.join(fields.values())}"
    used, total = (_bytes(fields.get(field, "")) for field in ("memory.used", "memory.total"))
    return Row(
        device=Device(
            index=int(index),
            chip=name,
            memory_bytes=None if total is None else int(total),  # [N/A] where the chip shares the host's memory
            driver=fields.get("driver_version", ""),
            uuid=fields.get("uuid", ""),
        ),
        bus=fields.get("pci.bus_id", ""),
        reading=reading(
            used_bytes=used,
            watts=_number(fields, "W", "power.draw", "gpu.power.draw"),
            limit_watts=_number(fields, "W", "power.limit", "gpu.current.power.limit"),
            celsius=_number(fields, "C", "temperature.gpu"),
            percent=_number(fields, "%", "utilization.gpu"),
            megahertz=_number(fields, "MHz", "clocks.sm", "clocks.current.sm"),
        ),
    )


def read_list(text: str) -> tuple[Row, ...]:
    """Return the devices of `-L` in its usual form, without memory: `GPU 0: NAME (UUID: GPU-...)`."""
    lines = re.finditer(r"^GPU +(\d+): (\S.*?) \(UUID: ([\w-]+)\)\s*$", text, re.MULTILINE)
    return tuple(Row(device=Device(index=int(line[1]), chip=line[2], uuid=line[3])) for line in lines)


def _with_unit(word: str, unit: str | None) -> str:
    return f"{word} {unit}" if unit and re.fullmatch(r"\d+(?:\.\d+)?", word) else word


def _bytes(word: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: ?(B|[KMGT]iB))?", word)
    return float(match[1]) * UNITS[match[2] or "MiB"] if match else None


def _number(fields: Mapping[str, str], unit: str, *names: str) -> str | None:
    word = next((fields[name] for name in names if name in fields), "")
    return search(rf"^(\d+(?:\.\d+)?)(?: ?{unit})?$", word)[0]
