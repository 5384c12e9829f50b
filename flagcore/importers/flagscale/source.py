"""A composed tree whose keys are taken one by one. Remaining keys get a note, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from flagcore.spec.importing import Notes


class Source(Notes):
    """A nested mapping whose keys are taken by their dotted paths. `left` has the remaining keys."""

    def __init__(self, tree: Mapping[str, Any], *, file: str) -> None:
        super().__init__(file)
        self.left = deepcopy(dict(tree))

    def at(self, path: str) -> Any:
        """Return the value at `path` without taking it, an empty mapping if there is none."""
        value: Any = self.left
        for part in path.split("."):
            value = value.get(part, {}) if isinstance(value, dict) else {}
        return value

    def take(self, path: str, default: Any = None) -> Any:
        """Return and remove the value at `path`; `default` if it is missing or null."""
        parent, _, name = path.rpartition(".")
        section = self.at(parent) if parent else self.left
        value = section.pop(name, None) if isinstance(section, dict) else None
        return default if value is None else value

    def put(self, path: str, value: Any) -> list[str]:
        """Set the value at `path`, and merge mappings. Existing values stay; return their keys."""
        *parents, name = path.split(".")
        section: Any = self.left
        for part in parents:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        existing = section.get(name)
        if isinstance(existing, dict) and isinstance(value, dict):
            section[name] = {**value, **existing}
            return [key for key in value if key in existing]
        if existing is None:
            section[name] = value
        return [] if existing is None else [""]

    def section(self, path: str) -> dict[str, Any]:
        """Take the mapping at `path`; another value gets a note and counts as empty."""
        return self.mapping(path, self.take(path))

    def mapping(self, path: str, value: Any) -> dict[str, Any]:
        """Return a copy of the mapping `value` of `path`; another value gets a note and counts as empty."""
        if isinstance(value, dict):
            return dict(value)
        if value is not None:
            self.note(path, "dropped: not a mapping")
        return {}

    def drop(self, path: str, why: str, at: str = "") -> None:
        """Remove a key or a section, with a note that gives the reason."""
        value = self.take(path)
        if value is None or value == {}:
            return
        keys = [key.removeprefix(".") for key, _ in leaves(value)] if isinstance(value, dict) else []
        self.note(f"{path} ({', '.join(keys)})" if keys else path, f"dropped: {why}", at)

    def note_unknown_keys(self) -> None:
        """Add a note on each remaining key."""
        for key, _ in leaves(self.left):
            self.note(key.removeprefix("."), "dropped: unknown to flagcore")


def leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path, with a dot before each part, and the value of each leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{at}.{key}")
        elif value is not None and value != {}:
            yield f"{at}.{key}", value
