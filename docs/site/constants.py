"""Adds the values of constants to the lists of a page, from the code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

FILE = re.compile(r"^- `(flagcore/[\w/]+)\.py`$")
NAME = re.compile(r"^    - `([A-Z_]+)`: ")


def fill(text: str) -> str:
    """Return the text with the value of each listed constant behind its name."""
    return "".join(_line(line, file) for line, file in _lines(text))


def listed(text: str) -> list[tuple[str, str]]:
    """Return the module and the name of each constant that a page lists."""
    return [(file, found[1]) for line, file in _lines(text) if file and (found := NAME.match(line))]


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line with the module whose constants it may name; outside of such a list, the module is empty."""
    module = ""
    for line in text.splitlines(keepends=True):
        if found := FILE.match(line.rstrip()):
            module = found[1].replace("/", ".")
        elif not line.startswith("    "):
            module = ""
        yield line, module


def _line(line: str, module: str) -> str:
    match = NAME.match(line) if module else None
    if match is None:
        return line
    value = getattr(importlib.import_module(module), match[1])
    return f"    - `{match[1]} = {value}`: {line[match.end() :]}"
