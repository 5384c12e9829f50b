"""Megatron's flags in the nested sections of a tree."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from flagcore.importers.flagscale.source import Source, leaves


def take_flags(source: Source, sections: Iterable[str], names: Collection[str]) -> list[tuple[str, Any]]:
    """Take the flags called `names` from sections that are dropped otherwise, each with its full key."""
    found = []
    for name in sections:
        section = source.at(name)
        for key in [key for key, _ in leaves(section) if _flag(key) in names] if isinstance(section, dict) else ():
            found.append((f"{name}{key}", source.take(f"{name}{key}")))
    return found


class Flags:
    """Sections of a tree flattened to flags as FlagScale does it: of equal names the last one is used.

    `before` are flags from other sections, with their full keys.
    """

    def __init__(self, source: Source, sections: Iterable[str], before: Iterable[tuple[str, Any]] = ()) -> None:
        self.source = source
        self._given: dict[str, tuple[str, Any]] = {}
        self._where: dict[str, str] = {}
        for key, value in before:
            self._add(key, value)
        for name in sections:
            for key, value in leaves(source.section(name)):
                self._add(f"{name}{key}", value)

    def _add(self, key: str, value: Any) -> None:
        flag, before = _flag(key), self._given.get(_flag(key))
        if before:
            self.source.note(before[0], f"dropped ({before[1]}): {key} comes later")
        self._given[flag], self._where[flag] = (key, value), key

    def take(self, name: str, default: Any = None) -> Any:
        """Return and remove the value of a flag; `default` if it is not given."""
        return self._given.pop(name, ("", default))[1]

    def has(self, name: str) -> bool:
        """Return whether a flag is given and not taken yet."""
        return name in self._given

    def given(self) -> list[tuple[str, Any]]:
        """Return the flags that are left, with their values."""
        return [(flag, value) for flag, (_, value) in self._given.items()]

    def key(self, name: str) -> str:
        """Return the full key of a flag, or the usual one if it is not given."""
        return self._where.get(name, f"train.model.{name}")

    def note(self, name: str, text: str, at: str = "") -> None:
        """Add a note on a flag."""
        self.source.note(self.key(name), text, at)

    def take_all(self) -> dict[str, tuple[str, Any]]:
        """Return and remove the flags that are left, each with its full key."""
        left, self._given = self._given, {}
        return left


def _flag(key: str) -> str:
    return key.rpartition(".")[2].replace("-", "_")
