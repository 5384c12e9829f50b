"""Reads what management tools answer to queries in the form that most took over: CSV, `-q` and `-L`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import BUS, UNITS, Row, found, reading

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
"""Lines of `-q`, with the section above them, by the field of a CSV query that says the same."""


def csv_rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Return the lines of a CSV query by field: `fields`, or those that a line of names and units above them says.

    A line with another number of fields (a warning, a cut one) is skipped. A unit of the header is put to the numbers.
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


def detailed(text: str) -> list[dict[str, str]]:
    """Return the devices of `-q`, one block each below its PCI address, by the fields of a CSV query."""
    (driver,) = found(r"(?m)^Driver Version\s*:\s*([\w.]+)", text)
    made: list[dict[str, str]] = []
    section = ""
    for line in text.splitlines():
        key, colon, value = (part.strip() for part in line.partition(" :"))
        start = re.fullmatch(rf"GPU ({BUS.pattern})", line.strip())
        if start:
            made.append({"index": str(len(made)), "pci.bus_id": start[1], "driver_version": driver or ""})
        elif made and key and not colon:
            section = key
        elif made and colon:
            if len(line) - len(line.lstrip()) <= 4:
                section = ""
            field = _BLOCK.get(f"{section}.{key}" if section else key)
            if field:
                made[-1].setdefault(field, value)
    return made


def csv_row(given: Mapping[str, str], place: int) -> Row | str:
    """Return the device of one line of a CSV query in the usual names of fields, or why it cannot be used.

    Numbers have their unit, or the usual one. `place` stands for an index that was not asked for.
    """
    index, name = given.get("index", str(place)), given.get("name", "")
    if not index.isdigit() or not name or name.startswith("[") or "ERR!" in name:
        return f"device {index} tells no name: {', '.join(given.values())}"
    used, total = (_bytes(given.get(field, "")) for field in ("memory.used", "memory.total"))
    return Row(
        device=Device(
            index=int(index),
            chip=name,
            memory_bytes=None if total is None else int(total),  # [N/A] where the chip shares the host's memory
            driver=given.get("driver_version", ""),
            uuid=given.get("uuid", ""),
        ),
        bus=given.get("pci.bus_id", ""),
        reading=reading(
            used_bytes=used,
            watts=_number(given, "W", "power.draw", "gpu.power.draw"),
            limit_watts=_number(given, "W", "power.limit", "gpu.current.power.limit"),
            celsius=_number(given, "C", "temperature.gpu"),
            percent=_number(given, "%", "utilization.gpu"),
            megahertz=_number(given, "MHz", "clocks.sm", "clocks.current.sm"),
        ),
    )


def listed(text: str) -> tuple[Row, ...]:
    """Return the devices of `-L` in its usual form, which tells no memory: `GPU 0: NAME (UUID: GPU-...)`."""
    lines = re.finditer(r"^GPU +(\d+): (\S.*?) \(UUID: ([\w-]+)\)\s*$", text, re.MULTILINE)
    return tuple(Row(device=Device(index=int(line[1]), chip=line[2], uuid=line[3])) for line in lines)


def _with_unit(word: str, unit: str | None) -> str:
    return f"{word} {unit}" if unit and re.fullmatch(r"\d+(?:\.\d+)?", word) else word


def _bytes(word: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: ?(B|[KMGT]iB))?", word)
    return float(match[1]) * UNITS[match[2] or "MiB"] if match else None


def _number(given: Mapping[str, str], unit: str, *fields: str) -> str | None:
    word = next((given[field] for field in fields if field in given), "")
    return found(rf"^(\d+(?:\.\d+)?)(?: ?{unit})?$", word)[0]
