"""Amounts with units in specs and options (durations, sizes, data rates), and the types of values with their limits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from annotated_types import Interval, Len

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


@dataclass(frozen=True, slots=True, eq=False)
class InUnits:
    """Marks a number that may also be a string with one of `units`, such as `example`."""

    units: Mapping[str, float]
    example: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # late: only the reader of specs needs it

        return core_schema.no_info_before_validator_function(self._number_of, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        text = {"type": "string", "pattern": amount_pattern(self.units), "examples": [self.example]}
        return {"anyOf": [handler(schema["schema"]), {**text, "units": list(self.units)}]}

    def _number_of(self, value: object) -> object:
        number = parse_amount(value, self.units) if isinstance(value, str) else None
        return value if number is None else number


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """Marks a string that must be one of `words`."""

    words: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # late, as above

        return core_schema.literal_schema(list(self.words))


MAX_DEVICES = MAX_PRICE = 1_000_000
MIN_MEMORY, MAX_MEMORY = 1 << 20, 1 << 50

Devices = Annotated[int, Interval(ge=1, le=MAX_DEVICES)]
NoDevices = Annotated[int, Interval(ge=0, le=MAX_DEVICES)]
Layers = Annotated[int, Interval(ge=1, le=1_000)]
NoLayers = Annotated[int, Interval(ge=0, le=1_000)]
Size = Annotated[int, Interval(ge=1, le=2**31)]
NoSize = Annotated[int, Interval(ge=0, le=2**31)]
Experts = Annotated[int, Interval(ge=1, le=65_536)]
NoExperts = Annotated[int, Interval(ge=0, le=65_536)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Factor = Annotated[float, Interval(gt=0, le=1_000)]
Seconds = Annotated[float, Interval(gt=0, le=100_000_000), InUnits(SECONDS, "600ms")]
Wait = Annotated[float, Interval(ge=0, le=86_400), InUnits(SECONDS, "5min")]
Word = Annotated[str, Len(1, 200)]
Value = Annotated[str, Len(0, 100_000)]
LONGEST_TEXT = 4096
Text = Annotated[str, Len(1, LONGEST_TEXT)]
Argument = Annotated[str, Len(0, LONGEST_TEXT)]
Rate = Annotated[float, Interval(ge=1_000_000, le=10**15), InUnits(BYTES_PER_SECOND, "50GB/s")]
Latency = Annotated[float, Interval(gt=0, le=1), InUnits(SECONDS, "5us")]
Speed = Annotated[float, Interval(ge=0.01, le=100)]
Price = Annotated[float, Interval(ge=0, le=MAX_PRICE)]
Memory = Annotated[int, Interval(ge=MIN_MEMORY, le=MAX_MEMORY), InUnits(BYTES, "4GiB")] | None
"""A memory size in bytes."""
