"""Megatron's flags in the nested sections of a tree, found by their own name wherever they are."""

from __future__ import annotations

from typing import Any

from flagcore.spec.flagscale.source import Source, leaves


class Flat:
    """Sections of a tree as FlagScale flattens them to flags: a key counts wherever it is, the last one first."""

    def __init__(self, source: Source, sections: tuple[str, ...]) -> None:
        self.source = source
        self._given: dict[str, tuple[str, Any]] = {}
        for name in sections:
            for key, value in leaves(source.section(name)):
                flag, before = key.rpartition(".")[2], self._given.get(key.rpartition(".")[2])
                if before and before[1] != value:
                    source.note(before[0], f"dropped ({before[1]}): {name}{key} comes later and counts")
                self._given[flag] = (f"{name}{key}", value)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a flag and forget it; `default` where it is not given."""
        return self._given.pop(name, ("", default))[1]

    def key(self, name: str) -> str:
        """Return where a flag belongs."""
        return f"train.model.{name}"

    def note(self, name: str, text: str, at: str = "") -> None:
        """Tell something of a flag."""
        self.source.note(self.key(name), text, at)

    def take_all(self) -> dict[str, tuple[str, Any]]:
        """Return what is left, each flag with its whole key, and forget it."""
        left, self._given = self._given, {}
        return left
