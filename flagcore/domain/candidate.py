"""Candidates: configurations with a value for every knob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

KnobValue: TypeAlias = int | bool | str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Knob names and values, in the order of the space. Two candidates with equal values are equal."""

    items: tuple[tuple[str, KnobValue], ...]

    @classmethod
    def of(cls, values: Mapping[str, KnobValue]) -> Candidate:
        """Return a candidate with the values of a mapping, in the order of the mapping."""
        return cls(tuple(values.items()))

    def as_dict(self) -> dict[str, KnobValue]:
        """Return the values by knob name."""
        return dict(self.items)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.items)
