"""FlagScale's files: a hydra tree goes in, the data of a spec comes out, with a note for each key that is not the same.

FlagScale is github.com/flagos-ai/FlagScale; read were `flagscale/runner`, `flagscale/serve` and `examples` of its
commit 16a2dd5b5c41 (2025-11-27). Importing this package is cheap: hydra is imported by the first call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flagcore.contracts import History, Importer
from flagcore.errors import SpecError
from flagcore.importers.flagscale.source import Note, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The data of a spec, all paths in it absolute, and what became of keys that mean something else or are gone.

    `tree` is what it was translated from, and `file` its top file.
    """

    data: dict[str, Any]
    notes: tuple[Note, ...]
    tree: dict[str, Any] = field(repr=False, default_factory=dict)
    file: str = ""

    def in_its_words(self, error: SpecError) -> SpecError:
        """Return an error of the spec with the tree's own key."""
        from flagcore.importers.flagscale.keys import in_words_of

        return in_words_of(self.tree, error, self.file)

    def as_yaml(self) -> str:
        """Return the spec as YAML, each note as a comment where it belongs."""
        from flagcore.importers.flagscale.written import with_comments

        return with_comments(self.data, self.notes)


class FlagScale:
    """Reads hydra trees and history.csv."""

    name, title = "flagscale", "FlagScale"

    def read_tree(self, directory: Path, name: str, overrides: Sequence[str] = ()) -> Imported:
        return read_tree(directory, name, overrides)

    def read_history(self, path: Path) -> History:
        from flagcore.importers.flagscale.history import read_history

        return read_history(path)


def read_tree(directory: Path, name: str, overrides: Sequence[str] = ()) -> Imported:
    """Compose `name` in `directory` as FlagScale does, and translate it.

    `overrides` are hydra's (`a.b=c`). Relative paths inside start at the working directory, as for FlagScale. Raises
    SpecError.
    """
    from flagcore.importers.flagscale.compose import compose

    file = str(directory / f"{name.removesuffix('.yaml')}.yaml")
    tree, unresolved = compose(directory, name, overrides, file=file)
    return translate(tree, unresolved, file=file)


def translate(tree: dict[str, Any], unresolved: Sequence[tuple[str, str]] = (), *, file: str) -> Imported:
    """Translate a composed tree, of which the `unresolved` keys, each with its reason, are absent. Raises SpecError."""
    from flagcore.importers.flagscale.layouts import straightened
    from flagcore.importers.flagscale.serving import serving
    from flagcore.importers.flagscale.training import training
    from flagcore.spec.plain_data import spec_error

    source = Source(tree, file=file)
    for key, why in unresolved:
        source.note(key, f"cannot be resolved ({why}): dropped")
    straightened(source)
    kind = source.take("experiment.task.type") or ("serve" if "serve" in tree else "train")
    if kind not in ("train", "serve"):
        problem, fix = "is no task that can be tuned", "use a tree that trains or serves"
        raise spec_error("experiment.task.type", problem, value=kind, fix=fix, file=file)
    if not tree.get(kind):
        problem, fix = (
            f"is missing, but experiment.task.type is {kind}",
            f"let defaults name a file of the folder {kind}",
        )
        raise spec_error(kind, problem, fix=fix, file=file)
    try:
        data = training(source) if kind == "train" else serving(source)
    except SpecError as error:
        raise _with_reason(error, unresolved) from None
    source.tell_what_is_left()
    return Imported(data=data, notes=tuple(source.notes), tree=tree, file=file)


def _with_reason(error: SpecError, unresolved: Sequence[tuple[str, str]]) -> SpecError:
    """Return an error of a key that is missing with the reason, where hydra could not resolve it."""
    from flagcore.spec.plain_data import spec_error

    for key, why in unresolved:
        if re.sub(r"\.(\d+)", r"[\1]", key) == error.key:
            return spec_error(error.key, f"cannot be resolved: {why}", fix=error.fix, file=error.file)
    return error


IMPORTER: Importer = FlagScale()
