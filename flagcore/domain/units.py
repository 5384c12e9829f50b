"""Amounts with units in specs and options: durations, sizes and data rates."""

import re
from collections.abc import Mapping
from typing import TypeVar

N = TypeVar("N", int, float)

SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PREFIXES = {letter: power for power, letter in enumerate("KMGT", start=1)}
BYTES: Mapping[str, int] = {
    "B": 1,
    **{f"{letter}{end}": 1000**power for letter, power in _PREFIXES.items() for end in ("", "B")},
    **{f"{letter}i{end}": 1024**power for letter, power in _PREFIXES.items() for end in ("", "B")},
}
"""The units of sizes in bytes: 60G and 60GB are 60 * 10**9, 60Gi and 60GiB are 60 * 2**30."""
BYTES_PER_SECOND: Mapping[str, float] = {
    **{f"{unit}/s": float(size) for unit, size in BYTES.items() if unit.endswith("B")},
    **{f"{letter}bit/s": 1000**power / 8 for letter, power in _PREFIXES.items()},
}


def amount_pattern(units: Mapping[str, float]) -> str:
    """Return the regular expression of an amount in one of these units, such as `1.5h`."""
    return rf"^([0-9]{{1,15}}(?:\.[0-9]{{1,6}})?) ?({'|'.join(units)})$"


def parse_amount(text: str, units: Mapping[str, N]) -> N | None:
    """Return an amount such as `600ms` in the base unit of `units`, or None if it is none."""
    match = re.fullmatch(amount_pattern(units), text)
    if match is None:
        return None
    unit = units[match[2]]
    return type(unit)(float(match[1]) * unit)
