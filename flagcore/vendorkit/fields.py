"""Reads a YAML file of a plugin key by key and reports what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

import yaml

from flagcore.domain.chip import Fact, Source
from flagcore.errors import SpecError

SOURCE_KEYS = {"measured": "how", "datasheet": "document", "published": "where", "estimated": "method"}
"""The key that each kind of source must have."""
OPTIONAL_SOURCE_KEYS = ("confidence", "date", "note", "page", "repeats", "software")
"""Keys that any source may have; others are allowed, too."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeys(_Loader):  # type: ignore[misc]
    """Refuses a duplicate key of a mapping: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; keep one")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_parts(text: str, file: str, kind: str) -> Part:
    """Return the content of a file of some `kind` ("a chip file"). Raises SpecError naming `file` if it is not YAML."""
    try:
        content = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, RecursionError) as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
        raise SpecError(file=file, key="the file", problem=problem) from error
    return Part(file, kind, "", content)


def read_file(package: str, name: str, kind: str) -> Part | None:
    """Return the content of a file of `package`; None if there is none. Raises SpecError as `read_parts`."""
    path = files(package).joinpath(name)
    return read_parts(path.read_text("utf-8"), f"{package}/{name}", kind) if path.is_file() else None


@dataclass(slots=True)
class Part:
    """One mapping of a file, without the keys that were read. `kind` says what the file is, `path` where it is."""

    file: str
    kind: str
    path: str
    content: Any

    def __post_init__(self) -> None:
        if not isinstance(self.content, Mapping):
            key = self.path or "the file"
            raise SpecError(file=self.file, key=key, value=self.content, problem="must be keys with values")
        self.content = dict(self.content)

    def wrong(self, key: object, problem: str, fix: str = "", value: object = None) -> SpecError:
        """Return an error that names file, key, value, rule and fix."""
        return SpecError(file=self.file, key=f"{self.path}{key}", value=value, problem=problem, fix=fix)

    def optional(self, key: str, kind: Any, default: Any) -> Any:
        """Return the value of `key`, which must be a `kind`, or `default`."""
        value = self.content.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
            problem = f"must be {words.get(kinds[-1], 'keys with values')}"
            raise self.wrong(key, problem, _number_hint(value, kinds), value)
        return value

    def required(self, key: str, kind: Any) -> Any:
        """Return the value of `key`, which must be there."""
        value = self.optional(key, kind, None)
        if value is None:
            raise self.wrong(key, "is missing")
        return value

    def choice(self, key: str, words: Sequence[str]) -> str:
        """Return the value of `key`, which must be one of `words`."""
        value: str = self.required(key, str)
        if value not in words:
            raise self.wrong(key, "invalid value", f"use one of {', '.join(words)}", value)
        return value

    def listed(self, key: str, kind: type) -> list[Any]:
        """Return a list of `kind`, empty if `key` is missing."""
        values: list[Any] = self.optional(key, list, [])
        for value in values:
            if not isinstance(value, kind):
                raise self.wrong(key, f"must be a list of {kind.__name__}", value=value)
        return values

    def each(self, key: str) -> list[Part]:
        """Return the mappings of the list under `key`, empty if it is missing."""
        entries = enumerate(self.listed(key, dict))
        return [Part(self.file, self.kind, f"{self.path}{key}[{place}].", entry) for place, entry in entries]

    def part(self, key: str) -> Part | None:
        """Return the mapping under `key`, or None."""
        value = self.content.pop(key, None)
        return None if value is None else Part(self.file, self.kind, f"{self.path}{key}.", value)

    def fact(self, key: str) -> Fact | None:
        """Return the figure under `key`, or None."""
        part = self.part(key)
        if part is None:
            return None
        value = part.required("value", (int, float))
        if not 0 < value < float("inf"):
            raise part.wrong("value", "must be above 0", "leave out what was neither published nor measured", value)
        fact = Fact(value=float(value), source=part.source("source"))
        part.finish()
        return fact

    def facts(self, key: str, names: tuple[str, ...]) -> dict[str, Fact]:
        """Return the figures under `key` by name, which must be one of `names`."""
        part = self.part(key)
        if part is None:
            return {}
        found = {name: fact for name in names if (fact := part.fact(name))}
        part.finish(f"the names are {', '.join(names)}")
        return found

    def source(self, key: str) -> Source:
        """Return where a figure is from."""
        part = self.part(key)
        if part is None:
            raise self.wrong(key, "is missing", "give the source of the figure")
        kind = part.choice("kind", tuple(SOURCE_KEYS))
        needed = SOURCE_KEYS[kind]
        for name in map(str, part.content):
            near = get_close_matches(name, {needed, *OPTIONAL_SOURCE_KEYS}, n=1, cutoff=0.75)
            if near and name not in {*OPTIONAL_SOURCE_KEYS, *SOURCE_KEYS.values()}:
                raise part.wrong(name, "unknown key", f"did you mean {near[0]}?", part.content[name])
        if part.content.get(needed) is None:
            fix = f"write {needed}: TEXT"
            for other, name in SOURCE_KEYS.items():
                if name in part.content:
                    fix += f"; {name} belongs to the kind {other}"
            raise part.wrong(needed, f"is missing: the kind {kind} needs it", fix)
        detail = part.required(needed, str)
        for name, value in part.content.items():
            if value is None:
                fix = f'put a text with a comma in quotes: {needed}: "{detail}, {name}"'
                raise part.wrong(repr(name), "has no value", fix)
        more = [f"{name} {value}" for name, value in part.content.items()]
        return Source(kind=kind, detail=", ".join([detail, *more]))

    def finish(self, fix: str = "") -> None:
        """Raise SpecError for a key that was not read."""
        for key in self.content:
            raise self.wrong(key, f"unknown key of {self.kind}", fix or "see docs/write-a-plugin.md for the keys")


def _number_hint(value: object, kinds: tuple[type, ...]) -> str:
    if float not in kinds or not isinstance(value, str):
        return ""
    try:
        return f"write {float(value):e} (YAML reads {value} as text)"
    except ValueError:
        return "write digits, e.g. 3.0e+14"
