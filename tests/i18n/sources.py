"""The texts of the sources that a person may read, as templates; run it to see what lacks its Chinese.

python tests/i18n/sources.py cli            # that of flagcore/cli
python tests/i18n/sources.py ../plugins/cpu/flagcore_cpu
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "flagcore"
COMMANDS = ("command", "group")
PLACE = re.compile(r"\{\d+\}")
ENDS = " \t\n,;:"
FEWEST_LETTERS = 6
MOST_VARIANTS = 8


@dataclass(frozen=True)
class Text:
    """A template, and where it stands. `sentence` is False for what may be a name: a word without blanks."""

    template: str
    place: str
    sentence: bool


def texts(file: Path) -> Iterator[Text]:
    """Yield the texts of one source file, a line each; docstrings only of commands."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inner: set[int] = set()
    for node in ast.walk(tree):
        place = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            inner.add(id(node.body[0].value))  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef) and any(map(_makes_command, node.decorator_list)):
                for paragraph in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n"):
                    yield from _lines([" ".join(paragraph.split())], place)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))  # what describes a name
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant):
            variants = _variants(node, inner)
            if variants is not None:
                yield from _lines(variants, place)


def _makes_command(decorator: ast.expr) -> bool:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Attribute) and call.attr in COMMANDS


def _lines(variants: list[str], place: str) -> Iterator[Text]:
    for variant in variants:
        for line in variant.split("\n"):
            template = normal(line)
            letters = sum(letter.isalpha() for letter in PLACE.sub("", template))
            words = re.findall(r"[A-Za-z]{2,}", PLACE.sub("\0", template))
            if letters and template.isprintable():
                yield Text(template, place, letters >= FEWEST_LETTERS and " " in template and bool(words))


def normal(line: str) -> str:
    """Return a template without what joins it to others, its places numbered."""
    numbers = itertools.count()
    line = re.sub(r"(?:\{\})+", lambda match: f"{{{next(numbers)}}}", line)
    line = re.sub(r"^(?:[\s,;:]|[-*•] |flag: )+|[\s,;:]+$", "", line)
    if line.startswith("(") and line.endswith(")") and line.count("(") == 1:
        line = line[1:-1]
    if line.endswith(".") and not line.endswith("..") and " " in line and not line[:1].isupper() and ". " not in line:
        line = line[:-1]
    return _renumbered(line)


def _renumbered(line: str) -> str:
    numbers = itertools.count()
    return PLACE.sub(lambda match: f"{{{next(numbers)}}}", line)


def _variants(node: ast.expr, inner: set[int]) -> list[str] | None:
    """Return what a string may be, `{}` for what is filled in; None if it is none. `inner` gets what was used."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            inner.add(id(value))
            if isinstance(value, ast.Constant):
                parts.append([str(value.value)])
            else:
                assert isinstance(value, ast.FormattedValue)
                parts.append(_choices(value.value, inner))
                if value.format_spec is not None:
                    inner.update(map(id, ast.walk(value.format_spec)))
        return _product(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = []
        for side in (node.left, node.right):
            found = _variants(side, inner)
            if found is not None:
                inner.add(id(side))
            sides.append(found)
        if sides == [None, None]:
            return None
        return _product(
            [side or _choices(each, inner) for side, each in zip(sides, (node.left, node.right), strict=True)]
        )
    return None


def _choices(value: ast.expr, inner: set[int]) -> list[str]:
    """Return both words of `'is' if one else 'are'`, else a place."""
    if isinstance(value, ast.IfExp):
        ends = (value.body, value.orelse)
        if all(
            isinstance(end, ast.Constant) and isinstance(end.value, str) and " " not in end.value.strip()
            for end in ends
        ):
            inner.update(map(id, ends))
            return [str(end.value) for end in ends if isinstance(end, ast.Constant)]
    return ["{}"]


def _product(parts: list[list[str]]) -> list[str]:
    count = 1
    for part in parts:
        count *= len(part)
    if count > MOST_VARIANTS:
        parts = [part if len(part) == 1 else ["{}"] for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def files(room: str) -> list[Path]:
    """Return the source files of a room of the core, or of another package by its folder."""
    place = CORE / room
    place = place if place.exists() else CORE / f"{room}.py" if (CORE / f"{room}.py").exists() else Path(room).resolve()
    return (
        [place] if place.is_file() else [each for each in sorted(place.rglob("*.py")) if "template" not in each.parts]
    )


def wanted(room: str) -> dict[str, str]:
    """Return the sentences of a room, with the first place of each."""
    found: dict[str, str] = {}
    for file in files(room):
        for text in texts(file):
            if text.sentence:
                found.setdefault(text.template, text.place)
    return found


if __name__ == "__main__":
    from flagcore.i18n.catalogue import read

    catalogues = [CORE / "language" / "zh", *(Path(room).resolve() / "messages" for room in sys.argv[1:])]
    known = {english for folder in catalogues for file in folder.glob("*.yaml") for english in read(file)}
    for room in sys.argv[1:] or [str(CORE)]:
        before = ""
        for template, place in wanted(room).items():
            if template not in known:
                file = place.partition(":")[0]
                if file != before:
                    print(f"\n# {file}")
                before = file
                print(json.dumps(template, ensure_ascii=False) + ':\n  ""')
