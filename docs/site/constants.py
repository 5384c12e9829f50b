"""Describes the constants that a page lists: adds their values and docstrings from the code."""

from __future__ import annotations

import ast
import importlib
import re
from functools import lru_cache
from pathlib import Path

LINE = re.compile(r"^- `(flagcore/[\w/]+)\.py`: ((?:`[A-Z_0-9]+`(?:,\s+|$))+)", re.MULTILINE)
NAME = re.compile(r"`([A-Z_0-9]+)`")


def fill(text: str) -> str:
    """Return the text with a nested list of values and docstrings in place of each line of constants."""
    return LINE.sub(lambda match: _described(match[1], NAME.findall(match[2])), text)


def listed(text: str) -> list[tuple[str, str]]:
    """Return the module and the name of each constant that a page lists."""
    return [(match[1].replace("/", "."), name) for match in LINE.finditer(text) for name in NAME.findall(match[2])]


def _described(path: str, names: list[str]) -> str:
    module = importlib.import_module(path.replace("/", "."))
    lines = (f"    - `{name} = {getattr(module, name)}`: {_docstrings(str(module.__file__))[name]}\n" for name in names)
    return f"- `{path}.py`\n{''.join(lines)}".rstrip("\n")


@lru_cache
def _docstrings(file: str) -> dict[str, str]:
    """Return the docstring of each constant of a file. Consecutive constants share the next docstring."""
    found, names = dict[str, str](), list[str]()
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        else:
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
            found |= dict.fromkeys(names, " ".join(str(text).split()))
            names = []
    return found
