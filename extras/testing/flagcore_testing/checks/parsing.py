"""Checks that the transcripts reach what the plugin's parsers do: each device, each reason and each reading."""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import isclose
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from flagcore_vendorkit import rows

from flagcore_testing import fakes
from flagcore_testing.checks.telemetry import READ
from flagcore_testing.kit import Problems, Subject, check, need, once
from flagcore_testing.package import FOLDER, SOURCES

Place = tuple[Path, int]
"""A file, and the number of a line in it."""


def _parsers(plugin: Subject) -> dict[Path, ast.Module]:
    """Return the modules of the plugin that make rows of devices. Raises Skip if there is none."""
    texts = {path: path.read_text("utf-8") for path in sorted(plugin.package_folder.glob("*.py"))}
    found = {path: ast.parse(text) for path, text in texts.items() if "Row(" in text}
    return need(found, "no module of the plugin makes a Row")


@once
def _reached(plugin: Subject) -> tuple[set[Place], dict[Place, set[str]]]:
    """Return the lines that detection and telemetry execute on the transcripts, and the arguments of each call of
    `reading` that gave a figure above 0 which `reads` has."""
    lines, given, expected = set[Place](), dict[Place, set[str]](), dict[str, float]()
    with _traced(plugin.package_folder, lines), _recorded(plugin, given, expected):
        for each in (each for each in plugin.transcripts if each.tool):
            read = ((figure, each.reads.get(key, 0.0) * unit) for key, (figure, unit) in READ.items())
            expected.clear()
            expected.update(read)
            fakes.samples(plugin, each)
    return lines, given


@contextmanager
def _traced(folder: Path, lines: set[Place]) -> Iterator[None]:
    """Add the lines of modules in `folder` that are executed to `lines`."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(folder)):
            return None
        lines.add((Path(frame.f_code.co_filename), frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _recorded(plugin: Subject, given: dict[Place, set[str]], expected: Mapping[str, float]) -> Iterator[None]:
    """Record the arguments of `reading` that give an expected figure above 0, by the place of the call."""

    def is_expected(figures: Mapping[str, float]) -> bool:
        return any(value and isclose(value, expected.get(name, 0.0), rel_tol=1e-3) for name, value in figures.items())

    def recording(own: Callable[..., Mapping[str, float]]) -> Callable[..., Mapping[str, float]]:
        def read(**words: Any) -> Mapping[str, float]:
            caller = sys._getframe(1)
            names = given.setdefault((Path(caller.f_code.co_filename), caller.f_lineno), set())
            names |= {name for name, word in words.items() if is_expected(own(**{name: word}))}
            return own(**words)

        return read

    with ExitStack() as stack:
        for path in _parsers(plugin):
            module = sys.modules.get(f"{plugin.package}.{path.stem}")
            if getattr(module, "reading", None) is rows.reading:
                stack.enter_context(mock.patch.object(module, "reading", recording(rows.reading)))
        yield


@check(f"add a transcript that has such a device, or an entry to {SOURCES} with `of` and `edits`")
def parsers_are_tried_on_transcripts(plugin: Subject) -> Problems:
    lines, _ = _reached(plugin)
    reached = {path for path, _ in lines}  # other modules read files or a library, which no transcript shows
    for path, tree in ((path, tree) for path, tree in _parsers(plugin).items() if path in reached):
        for node in ast.walk(tree):
            value = getattr(node, "value", None) if isinstance(node, ast.Return | ast.Yield) else None
            shown = _result(value)
            if isinstance(node, ast.Continue) and (path, node.lineno) not in lines:
                yield f"{path.name}:{node.lineno}: no file of {FOLDER} has a device or line that is ignored here"
            if value is not None and shown and not {(path, value.lineno), (path, getattr(node, "lineno", 0))} & lines:
                yield f"{path.name}:{value.lineno}: no file of {FOLDER} has {shown}"


def _result(value: ast.expr | None) -> str:
    """Return what a parser's result says about a device, or an empty string for other values."""
    if isinstance(value, ast.JoinedStr):
        words = [part.value for part in value.values if isinstance(part, ast.Constant)]
        return repr(max(map(str, words), key=len).strip()) if any(" " in str(word).strip() for word in words) else ""
    is_row = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Row"
    return "a device that this line reads" if is_row else ""


@check("correct the column or field, or let `reads` have a device in use: 0 is in many columns; edits of a file count")
def readings_are_found_in_transcripts(plugin: Subject) -> Problems:
    _, given = _reached(plugin)
    for path, tree in _parsers(plugin).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reading":
                names = {word.arg for word in node.keywords if word.arg} - given.get((path, node.lineno), set())
                for name in sorted(names) if (path, node.lineno) in given else ():
                    yield f"{path.name}:{node.lineno}: reading gets no {name} above 0 that {FOLDER / SOURCES} has"
