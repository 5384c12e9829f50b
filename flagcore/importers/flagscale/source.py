"""A composed tree from which keys are taken. Keys that are left get a note, so that none is dropped silently."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
