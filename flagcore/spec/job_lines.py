"""Lines of a job file: each a record, or the error that says where in the file it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from flagcore.errors import SpecError
from flagcore.spec.plain_data import spec_error

LONGEST_LINE = 1 << 20

Line = Mapping[str, Any] | SpecError


def job_lines(stream: BinaryIO, *, file: str) -> Iterator[Line]:
    """Yield what each line of `stream` holds, empty ones left out; an error names `file` and the line's number."""
    for number, line in enumerate(_lines(stream), start=1):
        if line.strip():
            yield _record(line, f"{file}: line {number}")


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long only its start, which is no JSON."""
    while line := stream.readline(LONGEST_LINE):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = stream.readline(LONGEST_LINE)
        yield line


def _record(line: bytes, where: str) -> Line:
    problem, fix = "", "write one JSON object a line"
    try:
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
        if isinstance(record, dict):
            if isinstance(record.get("id"), str):
                return record
            problem, fix = "has no id that is text", "give each record an id of its own, as text"
        else:
            problem = f"is no JSON object, but of type {type(record).__name__}"
    except json.JSONDecodeError as error:
        problem = f"cannot be read as JSON: {error.msg} (column {error.colno})"
        if len(line) >= LONGEST_LINE:
            problem = f"is longer than {LONGEST_LINE >> 20} MiB"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except RecursionError:
        problem = "is nested too deep"
    except ValueError as error:
        problem, fix = str(error), "mend it"
    return spec_error(where, problem, fix=fix)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"gives the key {twice[:64]!r} twice")
    return found
