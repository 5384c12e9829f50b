"""Helpers for importers: notes and errors about the keys of another tool, and the spec as commented YAML."""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flagcore.contracts import ImportedSpec
from flagcore.domain.spec import ImportNote
from flagcore.errors import SpecError
from flagcore.spec.plain_data import dump_yaml, spec_error

WIDTH = 110


class Notes:
    """Collects the notes and the errors of an import from `file`."""

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.notes: list[ImportNote] = []
        self.problems: list[SpecError] = []

    def note(self, key: str, text: str, at: str = "") -> None:
        """Add a note on a key of the other tuner, unless it is a duplicate.

        `at`: the related key of the spec. Empty if there is none.
        """
        if (note := ImportNote(key, " ".join(text.split()), at)) not in self.notes:
            self.notes.append(note)

    def error(self, key: str, problem: str, *, value: object = None, fix: str = "") -> SpecError:
        """Return an error about a key of the file."""
        return spec_error(key, problem, value=value, fix=fix, file=self.file)

    def report(self, key: str, problem: str, *, value: object = None, fix: str = "") -> None:
        """Add an error about a key of the file. The import raises all errors together when it ends."""
        self.problems.append(self.error(key, problem, value=value, fix=fix))


def commented_yaml(spec: ImportedSpec) -> str:
    """Return an imported spec as YAML, with its notes as comments.

    Each note is above its key or, if the data lack the key, above the innermost section that would contain it.
    """
    notes_by_key: dict[str, list[ImportNote]] = {}
    for note in spec.notes:
        key = note.at
        while key and not _has_key(spec.data, key):
            key = key.rpartition(".")[0]
        notes_by_key.setdefault(key, []).append(note)
    return "\n".join([*_comments(notes_by_key.get("", []), 0), *_lines(spec.data, "", notes_by_key)]) + "\n"


def _has_key(data: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _lines(data: Mapping[str, Any], path: str, notes_by_key: Mapping[str, list[ImportNote]]) -> Iterator[str]:
    depth = path.count(".") + 1 if path else 0
    for key, value in data.items():
        key_path = f"{path}.{key}" if path else key
        yield from _comments(notes_by_key.get(key_path, []), depth)
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(value, key_path, notes_by_key)
        else:
            flow = isinstance(value, list)
            text = dump_yaml({key: value}, default_flow_style=None if flow else False, width=math.inf)
            yield from ("  " * depth + line for line in text.splitlines())


def _comments(notes: Iterable[ImportNote], depth: int) -> Iterator[str]:
    indent = "  " * depth + "# "
    for note in notes:
        yield from textwrap.wrap(
            str(note), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
        )
