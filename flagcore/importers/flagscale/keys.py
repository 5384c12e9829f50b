"""The key of the tree from which a key of the spec comes, for errors of the spec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from flagcore.errors import SpecError
from flagcore.importers.flagscale.engines import AS_KNOBS, COMMON, KNOB_NAMES, TABLES
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import joined

_MOVED: dict[str, str] = TABLES["keys_of_spec"]
_RENAMED: dict[str, list[str]] = TABLES["names_of_spec"]
_PLACE = re.compile(r"(\[\d+\])+$")


def with_tree_key(tree: Mapping[str, Any], error: SpecError, file: str) -> SpecError:
    """Return an error of a spec with the tree's key and top `file`, if the key comes from the tree."""
    return joined([_renamed(tree, each, file) for each in error.problems])


def _renamed(tree: Mapping[str, Any], error: SpecError, file: str) -> SpecError:
    if error.file not in ("", file) or (key := _key_of(tree, error.key)) == error.key:
        return error
    return spec_error(key, error.problem, value=error.value, fix=error.fix, file=file)


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
