"""The result of an import: a spec with notes, its commented YAML, and errors with the keys of the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagcore.contracts import ImportNote
from flagcore.engines.megatron.importing.arguments import flag_name
from flagcore.errors import SpecError, join_errors
from flagcore.importers.flagscale.engines import COMMON_ARGUMENTS, KNOB_NAMES, KNOBS_BY_ARGUMENT, TABLES
from flagcore.spec.importing import commented_yaml
from flagcore.spec.plain_data import spec_error

_MOVED_KEYS: dict[str, str] = TABLES["keys_of_spec"]
_RENAMED_KEYS: dict[str, list[str]] = TABLES["names_of_spec"]
_INDEX_PATTERN = re.compile(r"(\[\d+\])+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The data of a spec with absolute paths, and notes on keys that are dropped or changed.

    `tree` is the composed tree, `file` its top file.
    """

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]
    tree: dict[str, Any] = field(repr=False, default_factory=dict)
    file: str = ""

    def translate_error(self, error: SpecError) -> SpecError:
        return join_errors([self._with_tree_key(each) for each in error.problems])

    def as_yaml(self) -> str:
        return commented_yaml(self.data, self.notes)

    def _with_tree_key(self, error: SpecError) -> SpecError:
        key = self._key_of_argument(str(error.value)) if error.key == "train.command" else _key_of(self.tree, error.key)
        if error.file not in ("", self.file) or key == error.key:
            return error
        return spec_error(key, error.problem, value=error.value, fix=error.fix, file=self.file)

    def _key_of_argument(self, words: str) -> str:
        """Return the key of a flag or of the program in the tree. Only notes have keys without a value."""
        if not words.startswith("--"):
            return "experiment.task.entrypoint"
        name = flag_name(words.split()[0].lstrip("-"))
        keys = [*(note.key for note in self.notes), *_leaves(self.tree)]
        matches = [key for key in keys if key.startswith("train.") and flag_name(key) == name]
        return matches[-1] if matches else "train.command"


def _key_of(tree: Mapping[str, Any], key: str) -> str:
    if key in _MOVED_KEYS and (key != "model" or tree.get("serve")):
        return _MOVED_KEYS[key]
    if re.match(r"envs\b", key):
        return f"experiment.{key}"
    without_index = _INDEX_PATTERN.sub("", key)
    if without_index.startswith(("auto_tuner.space.", "auto_tuner.control.")):
        section = f"experiment.{'.'.join(without_index.split('.')[:2])}"
    elif without_index.startswith(("auto_tuner.baseline.", "train.", "model.")):
        section = "train"
    elif without_index.startswith("serve."):
        section = "serve[0].profile" if without_index.startswith("serve.profile.") else "serve"
    else:
        return key
    names = _names(without_index.rpartition(".")[2])
    matches = [path for path in _leaves(tree) if path.startswith(section) and path.rpartition(".")[2] in names]
    return f"{matches[-1]}{key[len(without_index) :]}" if matches else key


def _names(name: str) -> set[str]:
    """Return all names of a knob or flag in trees, with hyphens and with underscores."""
    words = {name, *_RENAMED_KEYS.get(name, ())}
    for table in (KNOBS_BY_ARGUMENT, KNOB_NAMES, *COMMON_ARGUMENTS.values()):
        words |= {tree_name for tree_name, own_name in table.items() if own_name in words}
    return words | {each.replace("_", "-") for each in words}


def _leaves(data: Any, path: str = "") -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and any(isinstance(each, Mapping) for each in data):
        for number, value in enumerate(data):
            yield from _leaves(value, f"{path}[{number}]")
    else:
        yield path
