"""Converts FlagScale's hydra configurations to specs, with a note on each key that is dropped or changed.

FlagScale is github.com/flagos-ai/FlagScale; the format follows `flagscale/runner`, `flagscale/serve` and `examples` at
commit 16a2dd5b5c41 (2025-11-27). The first call imports hydra.
"""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore.contracts import ExportJob, Importer
from flagcore.domain.chip import Chip
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import spec_error
from flagcore_flagscale import compose, serving, training
from flagcore_flagscale.compose import normalize_layout
from flagcore_flagscale.experiment import check_experiment, drop_launcher_keys, environment
from flagcore_flagscale.export import export
from flagcore_flagscale.history import read_history
from flagcore_flagscale.source import Imported, Source


class FlagScale:
    """Imports hydra configurations and history.csv files, and exports candidates as configurations."""

    name, title, has_trees = "flagscale", "FlagScale", True
    targets: Mapping[str, Collection[str]] = {"flagscale": ("replicas",)}
    per_server = True
    most_vendors = sys.maxsize

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> Imported:
        """Compose the config `name` in `directory` with hydra's `overrides` (`a.b=c`), and translate it.

        As in FlagScale, relative paths are relative to the working directory. Raises SpecError.
        """
        file = str(directory / f"{name.removesuffix('.yaml')}.yaml")
        tree, unresolved = compose.compose(directory, name, overrides, file=file)
        return translate(tree, unresolved, file=file, chips=chips)

    read_history = staticmethod(read_history)

    def export(self, job: ExportJob, target: str) -> Mapping[str, str]:
        return export(job)


def translate(
    tree: dict[str, Any],
    unresolved: Sequence[tuple[str, str]] = (),
    *,
    file: str,
    chips: Callable[[], Sequence[Chip]] = tuple,
) -> Imported:
    """Translate a composed configuration without its `unresolved` keys, each with a reason. `chips` returns the chips
    of all plugins. Raises SpecError."""
    source = Source(tree, file=file)
    for key, why in unresolved:
        source.note(key, f"cannot be resolved ({why}){': dropped' if not key.startswith('train.') else ''}")
    normalize_layout(source)
    kind = source.take("experiment.task.type") or ("serve" if "serve" in tree else "train")
    if kind not in ("train", "serve"):
        problem, fix = "is not a task that can be tuned", "use a tree of type train or serve"
        raise spec_error("experiment.task.type", problem, value=kind, fix=fix, file=file)
    if not tree.get(kind):
        problem, fix = f"is missing, but experiment.task.type is {kind}", f"add a file of the folder {kind} to defaults"
        raise spec_error(kind, problem, fix=fix, file=file)
    try:
        check_experiment(source)
        missing = [key for key, _ in unresolved if key.startswith("train.")]
        data = training.training(source, chips, missing) if kind == "train" else serving.serving(source)
    except SpecError as error:
        source.problems += error.problems
    if source.problems:
        raise join_errors([_with_reason(each, unresolved) for each in source.problems])
    if envs := environment(source, own_devices=kind == "serve"):
        data["envs"] = envs
    drop_launcher_keys(source)
    source.note_unknown_keys()
    return Imported(data=data, notes=tuple(source.notes), tree=tree, file=file)


def _with_reason(error: SpecError, unresolved: Sequence[tuple[str, str]]) -> SpecError:
    """Return `error`, or an error with the reason if hydra could not resolve the key of `error`."""
    for key, why in unresolved:
        if re.sub(r"\.(\d+)", r"[\1]", key) == error.key:
            return spec_error(error.key, f"cannot be resolved: {why}", fix=error.fix, file=error.file)
    return error


IMPORTER: Importer = FlagScale()
