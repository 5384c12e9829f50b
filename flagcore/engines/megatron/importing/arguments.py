"""Megatron's arguments by name, from a command or from another tool's file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flagcore.spec.importing import Notes


class Flags:
    """Arguments by name, which is the last part of the key with underscores; the last of several equal names counts.

    `entries` are full keys and values. Nulls and empty mappings count as missing. `usual_key` is the key of a missing
    argument, with `{name}` or `{flag}`.
    """

    def __init__(self, source: Notes, entries: Iterable[tuple[str, Any]], usual_key: str = "--{flag}") -> None:
        self.source, self._usual_key = source, usual_key
        self._arguments: dict[str, tuple[str, Any]] = {}
        for key, value in entries:
            if value is None or value == {}:
                continue
            if previous := self._arguments.get(name := flag_name(key)):
                source.note(previous[0], f"dropped ({previous[1]}): {key} comes later")
            self._arguments[name] = (key, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a flag, `default` if it is missing."""
        return self._arguments.get(name, ("", default))[1]

    def has(self, name: str) -> bool:
        """Return whether a flag is present."""
        return name in self._arguments

    def names(self) -> list[str]:
        """Return the names of all flags."""
        return list(self._arguments)

    def key(self, name: str) -> str:
        """Return the full key of a flag; for a missing flag, its usual key."""
        usual_key = self._usual_key.format(name=name, flag=name.replace("_", "-"))
        return self._arguments.get(name, (usual_key, None))[0]

    def note(self, name: str, text: str, at: str = "") -> None:
        """Add a note on a flag."""
        self.source.note(self.key(name), text, at)


def flag_name(key: str) -> str:
    """Return the name of the flag for a key: its last part with underscores."""
    return key.rpartition(".")[2].lstrip("-").replace("-", "_")
