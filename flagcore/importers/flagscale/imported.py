"""What a tree becomes: a spec with notes, as commented YAML, and errors of the spec with the keys of the tree."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagcore.contracts import ImportNote
from flagcore.errors import SpecError, join_errors
from flagcore.importers.flagscale.engines import AS_KNOBS, COMMON, KNOB_NAMES, TABLES
from flagcore.importers.flagscale.source import flag_name
from flagcore.spec.data_file import dump_yaml
from flagcore.spec.plain_data import spec_error

_MOVED: dict[str, str] = TABLES["keys_of_spec"]
_RENAMED: dict[str, list[str]] = TABLES["names_of_spec"]
_PLACE = re.compile(r"(\[\d+\])+$")
WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The data of a spec, with absolute paths, and notes on keys that are dropped or mean something else.

    `tree` is the composed tree, `file` its top file.
    """

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]
    tree: dict[str, Any] = field(repr=False, default_factory=dict)
    file: str = ""

    def translate_error(self, error: SpecError) -> SpecError:
        return join_errors([self._renamed(each) for each in error.problems])

    def as_yaml(self) -> str:
        """Return the spec as YAML, each note above its key or above the nearest section that exists."""
        at_key: dict[str, list[ImportNote]] = {}
        for note in self.notes:
            at = note.at
            while at and not _has(self.data, at):
                at = at.rpartition(".")[0]
            at_key.setdefault(at, []).append(note)
        return "\n".join([*_comments(at_key.get("", []), 0), *_lines(self.data, "", at_key)]) + "\n"

    def _renamed(self, error: SpecError) -> SpecError:
        key = self._key_of_argument(str(error.value)) if error.key == "train.command" else _key_of(self.tree, error.key)
        if error.file not in ("", self.file) or key == error.key:
            return error
        return spec_error(key, error.problem, value=error.value, fix=error.fix, file=self.file)

    def _key_of_argument(self, words: str) -> str:
        """Return the key of a flag with its values, or of the program. Keys without a value are only in notes."""
        if not words.startswith("--"):
            return "experiment.task.entrypoint"
        name = flag_name(words.split()[0].lstrip("-"))
        keys = [*(note.key for note in self.notes), *_leaves(self.tree)]
        there = [key for key in keys if key.startswith("train.") and flag_name(key) == name]
        return there[-1] if there else "train.command"


def _key_of(tree: Mapping[str, Any], key: str) -> str:
    if key in _MOVED and (key != "model" or tree.get("serve")):
        return _MOVED[key]
    if re.match(r"envs\b", key):
        return f"experiment.{key}"
    bare = _PLACE.sub("", key)
    if bare.startswith(("auto_tuner.space.", "auto_tuner.control.")):
        above = f"experiment.{'.'.join(bare.split('.')[:2])}"
    elif bare.startswith(("auto_tuner.baseline.", "train.", "model.")):
        above = "train"
    elif bare.startswith("serve."):
        above = "serve[0].profile" if bare.startswith("serve.profile.") else "serve"
    else:
        return key
    names = _names(bare.rpartition(".")[2])
    there = [path for path in _leaves(tree) if path.startswith(above) and path.rpartition(".")[2] in names]
    return f"{there[-1]}{key[len(bare) :]}" if there else key


def _names(name: str) -> set[str]:
    """Return the names of a knob or flag in a tree, with hyphens or underscores."""
    words = {name, *_RENAMED.get(name, ())}
    for table in (AS_KNOBS, KNOB_NAMES, *COMMON.values()):
        words |= {theirs for theirs, ours in table.items() if ours in words}
    return words | {each.replace("_", "-") for each in words}


def _leaves(data: Any, at: str = "") -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{at}.{key}" if at else str(key))
    elif isinstance(data, list) and any(isinstance(each, Mapping) for each in data):
        for number, value in enumerate(data):
            yield from _leaves(value, f"{at}[{number}]")
    else:
        yield at


def _has(data: Any, at: str) -> bool:
    for part in at.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _lines(data: Mapping[str, Any], at: str, at_key: Mapping[str, list[ImportNote]]) -> Iterator[str]:
    depth = at.count(".") + 1 if at else 0
    for key, value in data.items():
        here = f"{at}.{key}" if at else key
        yield from _comments(at_key.get(here, []), depth)
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{key}:"
            yield from _lines(value, here, at_key)
        else:
            flow = isinstance(value, list)
            text = dump_yaml({key: value}, default_flow_style=None if flow else False, width=math.inf)
            yield from ("  " * depth + line for line in text.splitlines())


def _comments(notes: Iterable[ImportNote], depth: int) -> Iterator[str]:
    lead = "  " * depth + "# "
    for note in notes:
        yield from textwrap.wrap(
            str(note), WIDTH, initial_indent=lead, subsequent_indent=lead + "  ", break_on_hyphens=False
        )
