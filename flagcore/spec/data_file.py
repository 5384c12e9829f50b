"""Reading a YAML or JSON file that nobody vouches for into plain data."""

from __future__ import annotations

import json
import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flagcore.errors import SpecError
from flagcore.spec.plain_data import plain, spec_error

MAX_BYTES = 1 << 20


def read_mapping(path: Path, *, file: str, key: str = "file") -> dict[str, Any]:
    """Return the mapping in `path`, read as JSON where the suffix is `.json` and as YAML otherwise.

    `file` names the file in errors, and `key` what asked for it. Raises SpecError.
    """
    text = read_text(path, file=file, key=key)
    if path.suffix.lower() == ".json":
        data = plain(_json(text, file), file=file)
    else:
        from flagcore.spec.yaml_text import parse_yaml

        data = plain(parse_yaml(text, file=file), file=file)
    if data is None:
        raise spec_error(key, "is empty", fix="write a mapping of keys and values", file=file)
    if not isinstance(data, dict):
        raise spec_error((), "must be a mapping of keys and values", value=data, file=file)
    return data


def read_text(path: Path, *, file: str, key: str) -> str:
    """Return the text of a regular UTF-8 file of at most 1 MiB. Never waits for a pipe. Raises SpecError."""

    def error_of(problem: str, fix: str) -> SpecError:
        return spec_error(key, problem, value=str(path) if str(path) != file else None, fix=fix, file=file)

    content, problem, fix = b"", "", "give the path of a file that can be read"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                problem = "is not a regular file"
            else:
                content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        problem = "does not exist"
        fix = f"did you mean {near}?" if (near := _near(path)) else fix
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or 'not a path'})"
    if problem:
        raise error_of(problem, fix)
    if len(content) > MAX_BYTES:
        raise error_of(f"is larger than {MAX_BYTES >> 20} MiB", "it should be a few kilobytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start
    raise error_of(f"is not UTF-8 text (byte {place})", "save it as UTF-8")


def _near(path: Path) -> Path | None:
    """Return what stands beside a path that is not there under nearly its name."""
    try:
        (name,) = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except (OSError, ValueError):
        return None
    return path.with_name(name)


def _json(text: str, file: str) -> object:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise spec_error((key,), "is given twice", fix="keep one of them", file=file)
            found[key] = value
        return found

    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        place, problem = f"line {error.lineno}, column {error.colno}", error.msg
    except (RecursionError, ValueError) as error:
        place = "the document"
        problem = "it is nested too deep" if isinstance(error, RecursionError) else "a number has too many digits"
    raise spec_error(place, f"cannot be read as JSON: {problem}", file=file)
