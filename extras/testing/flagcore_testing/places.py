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
    package = folders[0]
    named = [path for name in _FILE.findall(message) for path in _found(name, folders)]
    named_chips = [word.casefold().rstrip(".:") for word in re.findall(r"[\w.+-]+", message)]
    chips = [path for path in package.glob("chips/*.yaml") if path.stem in named_chips]
    chips.sort(key=lambda path: named_chips.index(path.stem))
    files = named or [*chips, *sorted(package.glob("*.py")), *sorted(package.rglob("*.yaml"))]
    words = [quoted or plain for quoted, plain in _WORD.findall(message)]
    words += [part for word in words for part in reversed(re.split(r"[.\[\]]+", word)) if len(part) > 1]
    for path in files:
        lines = path.read_text("utf-8", "replace").splitlines()
        for word in words:
            pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
            if number := next((at for at, line in enumerate(lines, 1) if pattern.search(line)), 0):
                return f"{_shown(path, folders)}:{number}"
    hook = re.search(r"flagcore_(\w+)", message)
    answered_from = (f"{hook[1]}*.yaml", f"{hook[1]}/*.yaml", "discover.py") if hook else ()
    others = [*named, *chips, *(path for pattern in answered_from for path in sorted(package.glob(pattern)))]
    return f"{_shown(others[0], folders)}:1" if others else ""


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
