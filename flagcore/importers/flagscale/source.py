"""A composed tree from which keys are taken. Keys that are left get a note, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from flagcore.contracts import ImportNote
from flagcore.errors import SpecError
from flagcore.spec.plain_data import spec_error


class Source:
    """A nested mapping from which keys are taken by their dotted path. `left` are the keys not taken yet."""

    def __init__(self, tree: Mapping[str, Any], *, file: str) -> None:
        self.left, self.file = deepcopy(dict(tree)), file
        self.notes: list[ImportNote] = []
        self.problems: list[SpecError] = []

    def note(self, key: str, text: str, at: str = "") -> None:
        """Add a note on a key, once."""
        if (note := ImportNote(key, " ".join(text.split()), at)) not in self.notes:
            self.notes.append(note)

    def error(self, key: str, problem: str, *, value: object = None, fix: str = "") -> SpecError:
        """Return an error of the tree."""
        return spec_error(key, problem, value=value, fix=fix, file=self.file)

    def report(self, key: str, problem: str, *, value: object = None, fix: str = "") -> None:
        """Add an error of the tree: `translate` raises all of them at its end."""
        self.problems.append(self.error(key, problem, value=value, fix=fix))

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


class Flags:
    """Arguments by their names, which are the last parts of their keys with underscores: of equal ones the last counts.

    `entries` are full keys and values. Missing flags, nulls and empty mappings are alike.
    """

    def __init__(self, source: Source, entries: Iterable[tuple[str, Any]]) -> None:
        self.source = source
        self._given: dict[str, tuple[str, Any]] = {}
        for key, value in entries:
            if value is None or value == {}:
                continue
            if before := self._given.get(name := flag_name(key)):
                source.note(before[0], f"dropped ({before[1]}): {key} comes later")
            self._given[name] = (key, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a flag; `default` if it is not given."""
        return self._given.get(name, ("", default))[1]

    def has(self, name: str) -> bool:
        """Return whether a flag is given."""
        return name in self._given

    def names(self) -> list[str]:
        """Return the names of all flags."""
        return list(self._given)

    def key(self, name: str) -> str:
        """Return the full key of a flag, or the usual one if it is not given."""
        return self._given.get(name, (f"train.model.{name}", None))[0]

    def note(self, name: str, text: str, at: str = "") -> None:
        """Add a note on a flag."""
        self.source.note(self.key(name), text, at)


def flag_name(key: str) -> str:
    """Return the name of the flag of a key: its last part, with underscores."""
    return key.rpartition(".")[2].replace("-", "_")
