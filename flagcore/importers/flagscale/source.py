"""A composed tree from which keys are taken; what nobody takes is told, so that no key is lost in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Note:
    """What became of a key of FlagScale's. `at` is the key of the spec where it is told; empty: above all."""

    key: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class Source:
    """A nested mapping whose keys are taken one by one, by their dotted path."""

    def __init__(self, tree: Mapping[str, Any], *, file: str) -> None:
        self.left, self.file = deepcopy(dict(tree)), file
        self.notes: list[Note] = []

    def note(self, key: str, text: str, at: str = "") -> None:
        """Tell something of a key."""
        self.notes.append(Note(key, " ".join(text.split()), at))

    def at(self, path: str) -> Any:
        """Return what `path` leads to, and leave it there; an empty mapping where there is nothing."""
        found: Any = self.left
        for part in path.split("."):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        return found

    def take(self, path: str, default: Any = None) -> Any:
        """Return what `path` leads to and remove it; `default` where there is nothing, or null."""
        above, _, last = path.rpartition(".")
        section = self.at(above) if above else self.left
        found = section.pop(last, None) if isinstance(section, dict) else None
        return default if found is None else found

    def put(self, path: str, value: Any) -> list[str]:
        """Set what `path` leads to, and return the keys that are there already and stay; a mapping fills up another."""
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
        """Take a mapping; what is no mapping counts as an empty one, and is told."""
        return self.mapping(path, self.take(path))

    def mapping(self, path: str, found: Any) -> dict[str, Any]:
        """Return a copy of what `path` had; what is no mapping counts as an empty one, and is told."""
        if isinstance(found, dict):
            return dict(found)
        if found is not None:
            self.note(path, "is no mapping: dropped")
        return {}

    def drop(self, path: str, why: str, at: str = "") -> None:
        """Remove a key, or a section with all its keys, and tell why."""
        found = self.take(path)
        if found is None or found == {}:
            return
        inside = [key.removeprefix(".") for key, _ in leaves(found)] if isinstance(found, dict) else []
        self.note(f"{path} ({', '.join(inside)})" if inside else path, f"dropped: {why}", at)

    def tell_what_is_left(self) -> None:
        """Tell the keys that nobody has taken."""
        for key, _ in leaves(self.left):
            self.note(key.removeprefix("."), "dropped: not known to flagcore")


def leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path, a dot before each part, and the value of everything that is no mapping with keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{at}.{key}")
        elif value is not None and value != {}:
            yield f"{at}.{key}", value
