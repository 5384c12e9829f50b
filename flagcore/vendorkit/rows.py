"""Reads what a management tool prints of its devices: who each one is, and how it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flagcore.domain.chip import Device

MIB = 2**20
BUS = re.compile(r"\b[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One device of a table, its PCI address, and its reading: figures by a name that ends in the unit."""

    device: Device
    bus: str = ""
    reading: Mapping[str, float] = field(default_factory=dict)


def cells(line: str) -> list[str]:
    """Return what stands between the bars of a line of a table; empty for any other line, or one that was cut."""
    line = line.strip()
    return [cell.strip() for cell in line[1:-1].split("|")] if line[:1] == line[-1:] == "|" and len(line) > 1 else []


def sure(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows by index, without those that share one: a garbled table does not say which is which."""
    found = tuple(rows)
    count = Counter(row.device.index for row in found)
    return tuple(sorted((row for row in found if count[row.device.index] == 1), key=lambda row: row.device.index))


def reading(
    *,
    used_mib: str | None = None,
    watts: str | None = None,
    limit_watts: str | None = None,
    celsius: str | None = None,
    percent: str | None = None,
    megahertz: str | None = None,
) -> dict[str, float]:
    """Return the figures that are numbers in bytes, watts, degrees, shares and hertz; N/A and the like are left out."""
    given = {
        "memory_used_bytes": (used_mib, MIB),
        "power_watts": (watts, 1),
        "power_limit_watts": (limit_watts, 1),
        "temperature_celsius": (celsius, 1),
        "utilization_share": (percent, 0.01),
        "clock_hertz": (megahertz, 1e6),
    }
    return {name: float(word) * unit for name, (word, unit) in given.items() if word and _number(word)}


def found(pattern: str, text: str) -> tuple[str | None, ...]:
    """Return the groups of the first match of `pattern`, all None where there is none."""
    compiled = re.compile(pattern)
    match = compiled.search(text)
    return match.groups() if match else (None,) * compiled.groups


def csv_rows(text: str, fields: Sequence[str], known: Sequence[str]) -> list[dict[str, str]]:
    """Return the lines of a CSV query by field: `fields`, or those that its first line names, if they are all `known`.

    A line with another number of fields (a warning, a cut one) is skipped.
    """
    lines = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.strip()]
    header = [word.split(" [")[0] for word in lines[0]] if lines else []
    if "name" in header and set(header) <= set(known):
        fields, lines = header, lines[1:]
    return [dict(zip(fields, words, strict=True)) for words in lines if len(words) == len(fields)]


def csv_row(given: Mapping[str, str], place: int) -> Row | None:
    """Return the device of one line of a CSV query in the usual names of fields; None without index and name.

    Units after the numbers do not matter. `place` stands for an index that was not asked for.
    """
    index, name = given.get("index", str(place)), given.get("name", "")
    if not index.isdigit() or not name or name.startswith("["):
        return None
    total = plain(given.get("memory.total", ""))
    return Row(
        device=Device(
            index=int(index),
            chip=name,
            memory_bytes=int(float(total) * MIB) if total else None,  # [N/A] where the chip shares the host's memory
            driver=given.get("driver_version", ""),
            uuid=given.get("uuid", ""),
        ),
        bus=given.get("pci.bus_id", ""),
        reading=reading(
            used_mib=plain(given.get("memory.used", "")),
            watts=plain(given.get("power.draw", given.get("gpu.power.draw", ""))),
            limit_watts=plain(given.get("power.limit", given.get("gpu.current.power.limit", ""))),
            celsius=plain(given.get("temperature.gpu", "")),
            percent=plain(given.get("utilization.gpu", "")),
            megahertz=plain(given.get("clocks.sm", given.get("clocks.current.sm", ""))),
        ),
    )


CSV_FIELDS = (
    *("index", "name", "uuid", "serial", "pci.bus_id", "pci.device_id", "driver_version", "pstate", "compute_mode"),
    *("memory.total", "memory.used", "memory.free", "utilization.gpu", "utilization.memory", "temperature.gpu"),
    *("power.draw", "power.limit", "gpu.power.draw", "gpu.current.power.limit", "ecc.mode.current", "timestamp"),
    *("clocks.sm", "clocks.mem", "clocks.current.sm", "clocks.max.sm", "mig.mode.current", "compute_cap"),
    *("pcie.link.gen.max", "pcie.link.gen.current", "pcie.link.width.max", "pcie.link.width.current", "count"),
)
"""Names of fields by which the header of a CSV query is known."""


def listed(text: str) -> tuple[Row, ...]:
    """Return the devices of `-L` in its usual form, which tells no memory: `GPU 0: NAME (UUID: GPU-...)`."""
    lines = re.finditer(r"^GPU (\d+): (\S.*?) \(UUID: ([\w-]+)\)\s*$", text, re.MULTILINE)
    return tuple(Row(device=Device(index=int(line[1]), chip=line[2], uuid=line[3])) for line in lines)


def plain(word: str) -> str | None:
    """Return the number of a word that is one, with or without a unit."""
    return found(r"^(\d+(?:\.\d+)?)(?: ?[A-Za-z%]+)?$", word)[0]


def _number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word.strip()) is not None
