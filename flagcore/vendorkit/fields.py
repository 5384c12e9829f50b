"""Reads a YAML file part by part and says what is wrong with it. For the files of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from flagcore.domain.chip import Fact, Source
from flagcore.errors import SpecError

SOURCE_SAYS = {"measured": "how", "datasheet": "document", "published": "where", "estimated": "method"}
"""What each kind of source must say."""
SOURCE_MAY_SAY = ("confidence", "date", "note", "page", "repeats", "software")
"""What any of them may say beside it; other keys are kept, too."""


class _OnceEach(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: YAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: the key {key.value} is there twice; keep one")
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_parts(text: str, file: str, kind: str) -> Part:
    """Return the whole of a file of some `kind` ("a chip file"). Raises SpecError naming `file` if it is not YAML."""
    try:
        content = yaml.load(text, _OnceEach)
    except (yaml.YAMLError, RecursionError) as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
        raise SpecError(file=file, key="the file", problem=problem) from error
    return Part(file, kind, "", content)


@dataclass(slots=True)
class Part:
    """One mapping of a file, with the way to it, and the keys that were read from it. `kind` says what the file is."""

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

    def listed(self, key: str, kind: type) -> list[Any]:
        """Return a list of `kind`, empty where `key` is missing."""
        values: list[Any] = self.optional(key, list, [])
        for value in values:
            if not isinstance(value, kind):
                raise self.wrong(key, f"must be a list of {kind.__name__}", value=value)
        return values

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
            raise part.wrong("value", "must be above 0", "leave out what nobody published or measured", value)
        fact = Fact(value=float(value), source=part.source("source"))
        part.finish()
        return fact

    def facts(self, key: str, known: tuple[str, ...]) -> dict[str, Fact]:
        """Return the figures under `key` by name, which must be `known`."""
        part = self.part(key)
        if part is None:
            return {}
        found = {name: fact for name in known if (fact := part.fact(name))}
        part.finish(f"the precisions are {', '.join(known)}")
        return found

    def source(self, key: str) -> Source:
        """Return where a figure is from."""
        part = self.part(key)
        if part is None:
            raise self.wrong(key, "is missing", "say where the figure is from")
        kind = part.required("kind", str)
        if kind not in SOURCE_SAYS:
            raise part.wrong("kind", "is no kind of source", f"use one of {', '.join(SOURCE_SAYS)}", kind)
        word = SOURCE_SAYS[kind]
        for name in map(str, part.content):
            near = get_close_matches(name, {word, *SOURCE_MAY_SAY}, n=1, cutoff=0.75)
            if near and name not in {*SOURCE_MAY_SAY, *SOURCE_SAYS.values()}:
                raise part.wrong(name, "is misspelt", f"did you mean {near[0]}?", part.content[name])
        if part.content.get(word) is None:
            other = next((name for name in SOURCE_SAYS.values() if name in part.content), "")
            better = next((known for known, says in SOURCE_SAYS.items() if says == other), "")
            fix = f"write {word}: TEXT; {other} goes with the kind {better}" if other else f"write {word}: TEXT"
            raise part.wrong(word, f"is missing: a source that is {kind} says it", fix)
        told = part.required(word, str)
        for name, value in part.content.items():
            if value is None:
                fix = f'put a text with a comma in quotes: {SOURCE_SAYS[kind]}: "{told}, {name}"'
                raise part.wrong(repr(name), "has no value", fix)
        more = [f"{name} {value}" for name, value in part.content.items()]
        return Source(kind=kind, detail=", ".join([told, *more]))

    def finish(self, fix: str = "") -> None:
        """Refuse the keys that nobody read."""
        for key in self.content:
            raise self.wrong(key, f"is no key of {self.kind}", fix or "see docs/write-a-plugin.md for the keys")


def _number_hint(value: object, kinds: tuple[type, ...]) -> str:
    if float not in kinds or not isinstance(value, str):
        return ""
    try:
        return f"write {float(value):e} (YAML reads {value} as text)"
    except ValueError:
        return "write digits, e.g. 3.0e+14"
