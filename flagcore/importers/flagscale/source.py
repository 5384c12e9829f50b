"""A composed tree from which keys are taken. Keys that are left get a note, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Note:
    """What happened to a key. `at` is the key of the spec above which the note stands; empty: at the top."""

    key: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class Source:
    """A nested mapping from which keys are taken by their dotted path. `left` are the keys not taken yet."""

    def __init__(self, tree: Mapping[str, Any], *, file: str) -> None:
        self.left, self.file = deepcopy(dict(tree)), file
        self.notes: list[Note] = []

    def note(self, key: str, text: str, at: str = "") -> None:
        """Add a note on a key."""
        self.notes.append(Note(key, " ".join(text.split()), at))

    def at(self, path: str) -> Any:
        """Return the value at `path` without taking it; an empty mapping if there is none."""
        found: Any = self.left
        for part in path.split("."):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        return found

    def take(self, path: str, default: Any = None) -> Any:
        """Return and remove the value at `path`; `default` if there is none, or null."""
        above, _, last = path.rpartition(".")
        section = self.at(above) if above else self.left
        found = section.pop(last, None) if isinstance(section, dict) else None
        return default if found is None else found

    def put(self, path: str, value: Any) -> list[str]:
        """Set the value at `path`; mappings are merged. Values that are there already stay; return their keys."""
        *above, last = path.split(".")
        section: Any = self.left
        for part in above:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        before = section.get(last)
        if isinstance(before, dict) and isinstance(value, dict):
            section[last] = {**value, **before}
            return [key for key in value if key in before]
        if before is None:
            section[last] = value
        return [] if before is None else [""]

    def section(self, path: str) -> dict[str, Any]:
        """Take a mapping; anything else gets a note and counts as empty."""
        return self.mapping(path, self.take(path))

    def mapping(self, path: str, found: Any) -> dict[str, Any]:
        """Return a copy of `found`, the value of `path`; what is not a mapping gets a note and counts as empty."""
        if isinstance(found, dict):
            return dict(found)
        if found is not None:
            self.note(path, "dropped: not a mapping")
        return {}

    def drop(self, path: str, why: str, at: str = "") -> None:
        """Remove a key, or a section with all its keys, with a note that gives the reason."""
        found = self.take(path)
        if found is None or found == {}:
            return
        inside = [key.removeprefix(".") for key, _ in leaves(found)] if isinstance(found, dict) else []
        self.note(f"{path} ({', '.join(inside)})" if inside else path, f"dropped: {why}", at)

    def note_unknown_keys(self) -> None:
        """Add a note on each key that is left."""
        for key, _ in leaves(self.left):
            self.note(key.removeprefix("."), "dropped: unknown to flagcore")


def leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path, a dot before each part, and the value of everything but non-empty mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{at}.{key}")
        elif value is not None and value != {}:
            yield f"{at}.{key}", value
