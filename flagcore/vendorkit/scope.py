"""What an entry of a plugin's file applies to: engines, chips and engine releases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from flagcore.domain.chip import Chip
from flagcore.domain.knob import in_versions
from flagcore.errors import SpecError
from flagcore.vendorkit.fields import Content, build, entries

KINDS = ("train", "serve")
"""What an engine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The engines, kinds of engines, chips and engine releases of an entry. An empty field means all.

    `versions` is a range such as ">=0.11,<0.13".
    """

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
            and in_versions(self.versions, engine_version)
        )


EVERYTHING = Scope()


def scoped(content: Content, section: str, file: str) -> Iterator[tuple[str, Content, Scope]]:
    """Yield the path of each entry of a list, the rest of the entry, and its scope.

    That is under the keys `engine` or `engines`, `kinds`, `chips` and `versions`. Raises SpecError.
    """
    for path, entry in entries(content, section, file):
        keys: dict[str, Any] = {key: entry.pop(key) for key in Scope.__slots__ if key in entry}
        if "engine" in entry:
            keys["engines"] = (entry.pop("engine"),)
        scope: Scope = build(Scope, keys, file, path)
        for kind in set(scope.kinds) - set(KINDS):
            fix = f"use {' or '.join(KINDS)}"
            raise SpecError(file=file, key=f"{path}kinds", value=kind, problem="invalid value", fix=fix)
        try:
            SpecifierSet(scope.versions)
        except InvalidSpecifier:
            problem, fix = "invalid range of releases", 'write e.g. ">=0.11,<0.13"'
            raise SpecError(file=file, key=f"{path}versions", value=scope.versions, problem=problem, fix=fix) from None
        yield path, entry, scope
