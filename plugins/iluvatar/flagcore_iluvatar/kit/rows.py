"""Reads what a management tool prints of its devices: who each one is, and how it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
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


def _number(word: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", word.strip()) is not None
