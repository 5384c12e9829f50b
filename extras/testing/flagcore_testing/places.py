"""Finds the line of a plugin that a problem is about, by the words of the message."""

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

_FILE = re.compile(r"[\w@./-]*\w\.(?:yaml|jsonl|toml|txt|md|py)\b(?!:\d)")
_LINE = re.compile(r"\.(?:yaml|jsonl|toml|txt|md|py):\d+")
_WORD = re.compile(r"'([^']+)'|\b([A-Za-z_]\w*(?:\[\d+\])?(?:\.[A-Za-z_]\w*(?:\[\d+\])?)+|\w*_\w+|[a-z_]+\[\d+\])")
"""A quoted text, the path of a key such as `variables[1].meaning`, or a name with an underscore."""


def place_of(message: str, folders: Sequence[Path]) -> str:
    """Return `FILE:LINE` of what a message is about, or an empty string if it is unknown or part of the message.

    `folders` are the plugin's package and, if available, its source. The first file that contains a word of the message
    is used. Files are searched in this order: a file that the message names, the chip's file, data files, modules.
    """
    if _LINE.search(message) or not folders:
        return ""
    named = [path for name in _FILE.findall(message) for path in _found(name, folders)]
    package = folders[0]
    chips = _files_of_chips(message, package)
    files = named or [*chips, *sorted(package.glob("*.py")), *sorted(package.rglob("*.yaml"))]
    words = [quoted or plain for quoted, plain in _WORD.findall(message)]
    words += [part for word in words for part in reversed(re.split(r"[.\[\]]+", word)) if len(part) > 1]
    for path in files:
        if number := _line_of(words, path.read_text("utf-8", "replace").splitlines(), chips.get(path, 1)):
            return f"{_shown(path, folders)}:{number}"
    first = next(iter([*named, *chips, *_files_of_hook(message, package)]), None)
    return f"{_shown(first, folders)}:{chips.get(first, 1)}" if first else ""


def _line_of(words: Sequence[str], lines: Sequence[str], start: int) -> int:
    """Return the number of the first line from `start` with the first word that is in a line, or 0."""
    patterns = (re.compile(rf"(?<!\w){re.escape(word)}(?!\w)") for word in words)
    found = (at for pattern in patterns for at, line in enumerate(lines[start - 1 :], start) if pattern.search(line))
    return next(found, 0)


def _files_of_chips(message: str, package: Path) -> dict[Path, int]:
    """Return the files of the chips that a message names, in its order, and the first line of the first such chip."""
    names = [word.casefold().rstrip(".:") for word in re.findall(r"[\w.+-]+", message)]
    found = dict[str, tuple[Path, int]]()
    for path in package.glob("chips/*.yaml"):
        for at, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if line.startswith("chip:"):
                found[line[5:].partition("#")[0].strip("\"' ").casefold().replace(" ", "-")] = path, at
    places = [found[name] for name in names if name in found]
    return dict([*places, *reversed(places)])  # of several chips in a file, the line of the first one


def _files_of_hook(message: str, package: Path) -> list[Path]:
    """Return the files from which the hook that a message names is answered."""
    hook = re.search(r"flagcore_(\w+)", message)
    patterns = (f"{hook[1]}*.yaml", f"{hook[1]}/*.yaml", "discover.py") if hook else ()
    return [path for pattern in patterns for path in sorted(package.glob(pattern))]


def line_of_error(error: BaseException | None, folders: Sequence[Path]) -> str:
    """Return the last line of the plugin in the traceback of an error or of its causes, or an empty string if there is
    none."""
    found = ""
    while error is not None and not found and folders:
        for frame, line in traceback.walk_tb(error.__traceback__):
            path = Path(frame.f_code.co_filename)
            if folders[0].resolve() in path.resolve().parents:
                found = f"{_shown(path, folders)}:{line}"
        error = error.__cause__
    return found


def _found(name: str, folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        tail = name.partition("/")[2] if name.startswith(f"{folder.name}/") else name
        yield from (path for path in (folder / tail, *folder.glob(f"*/{tail}")) if path.is_file())


def _shown(path: Path, folders: Sequence[Path]) -> str:
    """Return a path relative to the plugin's source folder, or starting with the name of its package."""
    for folder in (*folders[1:], folders[0].parent):
        if folder.resolve() in path.resolve().parents:
            return path.resolve().relative_to(folder.resolve()).as_posix()
    return path.name
