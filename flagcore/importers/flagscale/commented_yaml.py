"""A spec as YAML with comments."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flagcore.contracts import ImportNote

WIDTH = 110
_DUMP: dict[str, Any] = {"allow_unicode": True, "width": math.inf}


def with_comments(data: Mapping[str, Any], notes: Iterable[ImportNote]) -> str:
    """Return `data` as YAML, each note above its key or above the nearest section that exists."""
    at_key: dict[str, list[ImportNote]] = {}
    for note in notes:
        at = note.at
        while at and not _has(data, at):
            at = at.rpartition(".")[0]
        at_key.setdefault(at, []).append(note)
    return "\n".join([*_comments(at_key.get("", []), 0), *_lines(data, "", at_key)]) + "\n"


def _has(data: Any, at: str) -> bool:
    for part in at.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _lines(data: Mapping[str, Any], at: str, at_key: Mapping[str, list[ImportNote]]) -> Iterator[str]:
    import yaml

    depth = at.count(".") + 1 if at else 0
    for key, value in data.items():
        here = f"{at}.{key}" if at else key
        yield from _comments(at_key.get(here, []), depth)
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(value, here, at_key)
        else:
            flow = isinstance(value, list)
            text = yaml.safe_dump({key: value}, default_flow_style=None if flow else False, **_DUMP)
            yield from ("  " * depth + line for line in text.splitlines())


def _comments(notes: Iterable[ImportNote], depth: int) -> Iterator[str]:
    lead = "  " * depth + "# "
    for note in notes:
        yield from textwrap.wrap(
            str(note), WIDTH, initial_indent=lead, subsequent_indent=lead + "  ", break_on_hyphens=False
        )
