"""Finds the line of a plugin that a problem is about: the key of a data file, or the function of a hook."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

DATA_OF_HOOKS = {
    "flagcore_chips": ("chips/*.yaml",),
    "flagcore_environment": ("environment.yaml",),
    "flagcore_engine_support": ("quirks.yaml", "engines.yaml"),
    **dict.fromkeys(("flagcore_check_task", "flagcore_failure_patterns", "flagcore_pruning_rules"), ("quirks.yaml",)),
    "flagcore_knobs": ("knobs.yaml",),
    "flagcore_kernel_costs": ("costs/*/*",),
    "flagcore_collective_costs": ("costs/*/collectives.yaml",),
    "flagcore_maturity": ("maturity.yaml",),
    "flagcore_devices": ("smi.py", "discover.py"),
    "flagcore_telemetry": ("smi.py",),
    "flagcore_memory_model": ("hooks.py", "memory.py"),
}
"""The files from which `VendorPlugin` answers each hook."""
_FILE = re.compile(r"[\w@./-]*\w\.(?:yaml|jsonl|toml|txt|md|py)\b(?!:\d)")
_LINE = re.compile(r"\.(?:yaml|jsonl|toml|txt|md|py):\d+")
_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\[\d+\])?(?:\.[A-Za-z_]\w*(?:\[\d+\])?)+|[a-z_]+\[\d+\]")
_NAME = re.compile(r"'([^']+)'|\b([A-Z][A-Z0-9]*_[A-Z0-9_]+|[a-z0-9]+_[a-z0-9_]+)\b")


def place_of(message: str, hooks: object, folders: Sequence[Path]) -> str:
    """Return `FILE:LINE` of what a message is about; empty if unknown, or if the message has it.

    `folders` are the plugin's package and, if it is here, its source.
    """
    if _LINE.search(message) or not folders:
        return ""
    named = [path for name in _FILE.findall(message) for path in _found(name, folders)]
    hook = re.search(r"flagcore_\w+", message)
    function = getattr(hooks, hook[0], None) if hook else None
    if not named and _is_own(function, folders[0]):
        return _of_function(function, folders)
    data = [path for pattern in DATA_OF_HOOKS.get(hook[0] if hook else "", ()) for path in folders[0].glob(pattern)]
    chip = re.match(r"([\w.+-]+)(?::|,| )", message)
    chips = [path for path in folders[0].glob("chips/*.yaml") if chip and path.stem == chip[1].casefold()]
    for path in (*named, *chips, *data):
        if line := _line(path, message):
            return f"{_shown(path, folders)}:{line}"
    if others := named or chips or data:
        return f"{_shown(others[0], folders)}:1"
    modules = sorted(folders[0].glob("*.py"))
    return next((f"{_shown(path, folders)}:{line}" for path in modules if (line := _line(path, message))), "")


def line_of_error(error: BaseException | None, folders: Sequence[Path]) -> str:
    """Return the last line of the plugin in the traceback of an error or its causes; empty if none."""
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


def _line(path: Path, message: str) -> int | None:
    """Return the line of the key or the name in a message; None if the file has none of them."""
    text, keys = path.read_text("utf-8", "replace"), sorted(_KEY.findall(message), key=len, reverse=True)
    lines = (_line_of_key(text, key) for key in (keys if path.suffix == ".yaml" else ()))
    if line := next(filter(None, lines), None):
        return line
    names = [quoted or plain for quoted, plain in _NAME.findall(message) if not plain.startswith("flagcore_")]
    names += [part for key in keys for part in reversed(re.split(r"[.\[\]]+", key)) if part and not part.isdigit()]
    for name in names:
        for number, line_text in enumerate(text.splitlines(), 1):
            if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", line_text):
                return number
    return None


def _line_of_key(text: str, path: str) -> int | None:
    """Return the line of a path such as `variables[1].meaning`, or of its deepest part that is there."""
    try:
        node: Any = yaml.compose(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return mark.line + 1 if mark else None
    line = None
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == part), None)
            if pair is None:
                return line
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            return line
    return line


def _is_own(function: Any, package: Path) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code is not None and package.resolve() in Path(code.co_filename).resolve().parents


def _of_function(function: Any, folders: Sequence[Path]) -> str:
    code = inspect.unwrap(function).__code__
    return f"{_shown(Path(code.co_filename), folders)}:{code.co_firstlineno}"


def _shown(path: Path, folders: Sequence[Path]) -> str:
    """Return a path relative to the plugin's source, or with the name of its package."""
    for folder in (*folders[1:], folders[0].parent):
        if folder.resolve() in path.resolve().parents:
            return path.resolve().relative_to(folder.resolve()).as_posix()
    return path.name
