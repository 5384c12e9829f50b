"""Data classes of an import: its input and its result.

This module also contains FlagScale's names of serving engines, of their knobs and flags, and the lists of
`tables.yaml`.

`Source` is a composed configuration from which keys are taken one by one. Remaining keys get a note, so that none is
dropped silently. `Imported` is a spec with notes, and errors that name the keys of the configuration.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from flagcore_importers.dialect import flat
from flagcore_llamacpp.engine import ENGINE as LLAMACPP
from flagcore_megatron.importing.arguments import flag_name
from flagcore_sglang.engine import ENGINE as SGLANG
from flagcore_vllm.engine import ENGINE as VLLM

from flagcore.contracts import ImportedSpec
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import Notes, package_yaml, spec_error

TABLES: dict[str, Any] = package_yaml(__package__, "tables.yaml")
ENGINES = {"vllm": "vllm", "sglang": "sglang", "llama_cpp": "llamacpp", "llamacpp": "llamacpp"}
"""Maps FlagScale's names of engines to flagcore's names."""
DEFAULT_ENGINES = ("vllm", "llama_cpp")
"""The default engines of a configuration that names none, as in FlagScale."""
KNOBS = {
    name: frozenset(knob.name for knob in engine.knobs)
    for name, engine in (("vllm", VLLM), ("sglang", SGLANG), ("llamacpp", LLAMACPP))
}
"""Names of knobs by engine."""
PROGRAMS = {"vllm": VLLM.program, "sglang": SGLANG.program, "llamacpp": LLAMACPP.program}
"""The command lines of engines, with the classes of their settings."""
DEFAULT_SPACE: dict[str, dict[str, Any]] = TABLES["own_space"]
KNOB_NAMES = {"instance": "instances", "instace": "instances"}
"""Maps names in FlagScale's spaces to flagcore's knobs. The second name is a typo in its space for SGLang."""
COMMON_ARGUMENTS: dict[str, dict[str, str]] = TABLES["common_arguments"]
KNOBS_BY_ARGUMENT: dict[str, str] = TABLES["arguments_as_knobs"]
RESERVED_ARGUMENTS: dict[str, str] = TABLES["own_arguments"]


def flagscale_name(engine: str) -> str:
    """Return FlagScale's name for an engine of flagcore."""
    return next(name for name, ours in ENGINES.items() if ours == engine)


class Source(Notes):
    """A nested mapping from which keys are taken by their dotted paths. `left` contains the remaining keys."""

    def __init__(self, tree: Mapping[str, Any], *, file: str) -> None:
        super().__init__(file)
        self.left = deepcopy(dict(tree))

    def at(self, path: str) -> Any:
        """Return the value at `path` without taking it, or an empty mapping if there is none."""
        value: Any = self.left
        for part in path.split("."):
            value = value.get(part, {}) if isinstance(value, dict) else {}
        return value

    def take(self, path: str, default: Any = None) -> Any:
        """Return and remove the value at `path`. Return `default` if it is missing or null."""
        parent, _, name = path.rpartition(".")
        section = self.at(parent) if parent else self.left
        value = section.pop(name, None) if isinstance(section, dict) else None
        return default if value is None else value

    def put(self, path: str, value: Any) -> list[str]:
        """Set the value at `path`; mappings are merged. Existing values are not replaced; return their keys."""
        *parents, name = path.split(".")
        section: Any = self.left
        for part in parents:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        existing = section.get(name)
        if isinstance(existing, dict) and isinstance(value, dict):
            section[name] = {**value, **existing}
            return [key for key in value if key in existing]
        if existing is None:
            section[name] = value
        return [] if existing is None else [""]

    def section(self, path: str) -> dict[str, Any]:
        """Take the mapping at `path`. If the value is not a mapping, add a note and return an empty mapping."""
        return self.mapping(path, self.take(path))

    def mapping(self, path: str, value: Any) -> dict[str, Any]:
        """Return a copy of `value`, which is at `path`. If it is not a mapping, add a note and return an empty
        mapping."""
        if isinstance(value, dict):
            return dict(value)
        if value is not None:
            self.note(path, "dropped: not a mapping")
        return {}

    def drop(self, path: str, why: str, at: str = "") -> None:
        """Remove a key or a section, with a note that gives the reason."""
        value = self.take(path)
        if value is None or value == {}:
            return
        keys = [key for key, each in flat(value) if each not in (None, {})] if isinstance(value, dict) else []
        self.note(f"{path} ({', '.join(keys)})" if keys else path, f"dropped: {why}", at)

    def note_unknown_keys(self) -> None:
        """Add a note on each remaining key."""
        for key, value in flat(self.left):
            if value != {}:
                self.note(key, "dropped: unknown to flagcore")


_MOVED_KEYS: dict[str, str] = TABLES["keys_of_spec"]
_RENAMED_KEYS: dict[str, list[str]] = TABLES["names_of_spec"]
_INDEX_PATTERN = re.compile(r"(\[\d+\])+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported(ImportedSpec):
    """An imported configuration. `tree` is the composed configuration, `file` its top file."""

    tree: dict[str, Any] = field(repr=False, default_factory=dict)

    def translate_error(self, error: SpecError) -> SpecError:
        return join_errors([self._with_tree_key(each) for each in error.problems])

    def _with_tree_key(self, error: SpecError) -> SpecError:
        key = self._key_of_argument(str(error.value)) if error.key == "train.command" else _key_of(self.tree, error.key)
        if error.file not in ("", self.file) or key == error.key:
            return error
        return spec_error(key, error.problem, value=error.value, fix=error.fix, file=self.file)

    def _key_of_argument(self, words: str) -> str:
        """Return the key of a flag or of the program in the configuration. Keys without a value are found in the
        notes."""
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
    """Return all names that a knob or flag may have in a configuration, with hyphens and with underscores."""
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
