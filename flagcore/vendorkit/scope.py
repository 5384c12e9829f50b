"""What an entry of a plugin's file applies to: engines, chips and engine releases."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.chip import Chip
from flagcore.vendorkit.fields import Part
from flagcore.vendorkit.versions import in_range, read_versions

KINDS = ("train", "serve")
"""What an engine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The engines, kinds of engines, chips and engine releases of an entry. An empty field means all."""

    engines: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()
    versions: str = ""

    def includes(self, chip: Chip, engine: str, engine_version: str | None = None, kind: str = "") -> bool:
        """Return whether the entry applies. An unknown release is included."""
        return (
            (not self.engines or engine in self.engines)
            and (not self.kinds or kind in self.kinds)
            and (not self.chips or chip.name in self.chips)
            and in_range(self.versions, engine_version)
        )


EVERYTHING = Scope()


def read_scope(part: Part) -> Scope:
    """Return the scope under the keys `engine` or `engines`, `kinds`, `chips` and `versions`. Raises SpecError."""
    engine = part.optional("engine", str, None)
    kinds = tuple(part.listed("kinds", str))
    for kind in set(kinds) - set(KINDS):
        raise part.wrong("kinds", "invalid value", f"use {' or '.join(KINDS)}", kind)
    return Scope(
        engines=(engine,) if engine else tuple(part.listed("engines", str)),
        kinds=kinds,
        chips=tuple(part.listed("chips", str)),
        versions=read_versions(part),
    )
