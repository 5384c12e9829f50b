"""Finds keys of a tree that are dropped silently: they neither change the spec nor appear in a note."""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from flagcore_flagscale import Imported, translate

from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError

KeyPath = tuple[str | int, ...]
_GONE = ("dropped", "cannot be resolved", "cannot run")


TREES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("trees.yaml").read_text("utf-8"))
"""Trees by name: the text of each of their files, by path."""
CPU_TREE = TREES.pop("cpu")
"""A tree that trains on two CPU ranks."""


def write_tree(tree: Mapping[str, str], folder: Path) -> None:
    """Write the files of a tree into a folder."""
    for path, text in tree.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def unaccounted(tree: dict[str, Any]) -> list[str]:
    """Return the leaves of a composed tree that neither change the spec nor are named in a note."""
    translated = translate(tree, file="x")
    named = Named(translated.notes)
    return [
        spelt(path) for path, value in leaves(tree) if path not in named and not counts(tree, path, value, translated)
    ]


def counts(tree: dict[str, Any], path: KeyPath, value: Any, whole: Imported) -> bool:
    """Return whether another value, or none, makes another spec, or is refused."""
    for other in (_ABSENT, *others(value)):
        changed = copy.deepcopy(tree)
        section: Any = changed
        for part in path[:-1]:
            section = section[part]
        if other is _ABSENT:
            del section[path[-1]]
        else:
            section[path[-1]] = other
        try:
            if translate(changed, file="x").data != whole.data:
                return True
        except SpecError:
            return True
    return False


_ABSENT = object()


def others(value: Any) -> tuple[Any, ...]:
    """Return other values of the same kind."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, (int, float)):
        return (value + 1, value * 2, 1 if value != 1 else 3)
    if isinstance(value, list):
        return (value[:-1], [*value, *value], [1, 7])
    return (f"{value}x", "auto" if value != "auto" else [1])


def leaves(data: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of all that is no mapping; lists of mappings have places, other lists are values."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*at, key))
    elif isinstance(data, list) and any(isinstance(each, dict) for each in data):
        for place, value in enumerate(data):
            yield from leaves(value, (*at, place))
    elif data is not None and data != {}:
        yield at, data


def spelt(path: KeyPath) -> str:
    """Write a path as notes do: `serve[0].engine`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


class Named:
    """The keys that notes name: each for itself, for all below it if it is gone, and elsewhere if it was moved."""

    def __init__(self, notes: tuple[ImportNote, ...]) -> None:
        self.keys: set[str] = set()
        self.gone: set[str] = set()
        self.moved: list[tuple[str, str]] = []
        for note in notes:
            for key in _keys(note.key):
                self.keys.add(key)
                if note.text.startswith(_GONE):
                    self.gone.add(key)
                if found := re.match(r"read as (?:arguments of )?([\w.\[\]]+)", note.text):
                    self.moved.append((key, found[1].rstrip(".,:")))

    def __contains__(self, path: KeyPath) -> bool:
        spellings = [spelt(path)]
        for old, new in self.moved:
            at = [each for each in spellings if each == old or each.startswith(f"{old}.")]
            spellings += [new + each[len(old) :] for each in at]
        spellings += [each.replace("-", "_") for each in spellings]
        if any(each in self.keys for each in spellings):
            return True
        return any(each.startswith((f"{key}.", f"{key}[")) for each in spellings for key in self.gone)


def _keys(text: str) -> Iterator[str]:
    """Yield the keys of a note: `a.b`, those of `a.b (c, d)`, of `a.b, a.c`, and of `a.b, c`."""
    if found := re.fullmatch(r"(.*?) \((.*)\)", text):
        yield from (f"{found[1]}.{each}" for each in found[2].split(", "))
        return
    above = text.split(", ")[0].rpartition(".")[0]
    for place, key in enumerate(text.split(", ")):
        yield key if place == 0 or "." in key else f"{above}.{key}"
