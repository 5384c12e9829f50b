"""Imports recipes of Megatron-Bridge as specs, with a note on each key that is dropped or changed.

Megatron-Bridge is github.com/NVIDIA-NeMo/Megatron-Bridge; the format is that of `ConfigContainer.to_yaml` and of the
`run_config.yaml` in its checkpoints, as of commit 067f987d (2026-08-22) and release 0.3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore.contracts import Importer, ImportNote
from flagcore.domain.chip import Chip
from flagcore.errors import SpecError, join_errors
from flagcore.importers.bridge.recipe import read_recipe
from flagcore.importers.bridge.translation import translate
from flagcore.spec.importing import commented_yaml
from flagcore.spec.plain_data import spec_error

SECTIONS = {"model": "model", "train.seq_length": "dataset", "train": "train", "auto_tuner.baseline": "model"}
"""Sections of a config by those of a spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    """The data of a spec, and notes on the keys of a config that are dropped or changed."""

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]
    file: str

    def translate_error(self, error: SpecError) -> SpecError:
        return join_errors([self._with_own_key(each) for each in error.problems])

    def as_yaml(self) -> str:
        return commented_yaml(self.data, self.notes)

    def _with_own_key(self, error: SpecError) -> SpecError:
        for prefix, section in SECTIONS.items():
            if error.key == prefix or error.key.startswith(f"{prefix}."):
                key = f"{section}.{error.key.rpartition('.')[2]}" if "." in error.key else section
                return spec_error(key, error.problem, value=error.value, fix=error.fix, file=self.file)
        return error


class Bridge:
    """Imports configs of Megatron-Bridge."""

    name, title, has_trees = "bridge", "Megatron-Bridge", False

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedRecipe:
        """Return the config in the file or checkpoint `name`, or else that of the recipe `name` of the installed
        package, with `overrides` such as `train.global_batch_size=512`. Raises SpecError, UsageError.
        """
        config, file, added = read_recipe(directory / name, name, overrides)
        data, notes = translate(config, file, name, chips, added)
        return ImportedRecipe(data=data, notes=notes, file=file)


IMPORTER: Importer = Bridge()
