"""A composed tree whose keys are taken one by one. Remaining keys get a note, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from flagcore.contracts import ImportNote
from flagcore.errors import SpecError
from flagcore.spec.plain_data import spec_error


class Source:
    """A nested mapping whose keys are taken by their dotted paths. `left` has the remaining keys."""

    def __init__(self, tree: Mapping[str, Any], *, file: str) -> None:
        self.left, self.file = deepcopy(dict(tree)), file
        self.notes: list[ImportNote] = []
        self.problems: list[SpecError] = []

    def note(self, key: str, text: str, at: str = "") -> None:
        """Add a note on a key if it is not a duplicate."""
        if (note := ImportNote(key, " ".join(text.split()), at)) not in self.notes:
            self.notes.append(note)

    def error(self, key: str, problem: str, *, value: object = None, fix: str = "") -> SpecError:
        """Return an error of the tree."""
        return spec_error(key, problem, value=value, fix=fix, file=self.file)

    def report(self, key: str, problem: str, *, value: object = None, fix: str = "") -> None:
        """Add an error of the tree; `translate` raises all errors at its end."""
        self.problems.append(self.error(key, problem, value=value, fix=fix))

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


class Flags:
    """Arguments by name, which is the last part of the key with underscores; the last of several equal names counts.

    `entries` are full keys and values. Nulls and empty mappings count as missing.
    """

    def __init__(self, source: Source, entries: Iterable[tuple[str, Any]]) -> None:
        self.source = source
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
        return self._arguments.get(name, (f"train.model.{name}", None))[0]

    def note(self, name: str, text: str, at: str = "") -> None:
        """Add a note on a flag."""
        self.source.note(self.key(name), text, at)


def flag_name(key: str) -> str:
    """Return the name of the flag for a key: its last part with underscores."""
    return key.rpartition(".")[2].replace("-", "_")
