"""Importers convert files of another tuner to a spec or to trials. Entry points in the group `flagcore.importers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flagcore.domain.candidate import KnobValue
from flagcore.domain.chip import Chip
from flagcore.errors import SpecError


@dataclass(frozen=True, slots=True)
class ImportNote:
    """A note on the conversion of a key of the other tuner. `at` is the related key of the spec; empty: none."""

    key: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class ImportedSpec(Protocol):
    """The data of a spec, with absolute paths, read from `file`."""

    @property
    def data(self) -> dict[str, Any]: ...
    @property
    def notes(self) -> Sequence[ImportNote]: ...
    @property
    def file(self) -> str: ...

    def translate_error(self, error: SpecError) -> SpecError:
        """Return an error of the spec with the key of the other tuner's file."""

    def as_yaml(self) -> str:
        """Return the spec as YAML, with the notes as comments."""


class Importer(Protocol):
    """Reads the configuration of another tuner."""

    name: str
    title: str
    """The name of the other tuner in messages."""
    has_trees: bool
    """Whether configs are hydra's trees, which `flag tune --config-path` also reads. Otherwise a config is one file, or
    the name of a recipe.
    """

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedSpec:
        """Return the configuration `name` in `directory` with `overrides` such as `a.b=c`. Raises SpecError.

        `chips` returns the chips of all plugins.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One trial of another tuner.

    `line` is its line in the file, where the heading is line 1; `index` is its number. `step_s` is the mean time of a
    training step, `figures` are the figures of a server by flagcore's names, and `error` is the reason if there are
    none. `split` is whether the first or last pipeline stage has another number of layers. `cut` is whether the tuner
    ended the trial early. `refused` is the reason why the row cannot be imported; empty if it can.
    """

    line: int
    index: int
    knobs: Mapping[str, KnobValue]
    engine: str | None
    step_s: float | None
    figures: Mapping[str, float]
    reserved_bytes: int | None
    out_of_memory: bool
    error: str | None
    elapsed_s: float
    split: bool
    cut: bool
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The trials of another tuner in the order in which they ran. `serves` is whether they are serving trials.

    `time_limit_s` is the other tuner's default time limit of a trial.
    """

    rows: tuple[HistoryRow, ...]
    serves: bool
    time_limit_s: float


@runtime_checkable
class HistoryReader(Protocol):
    """Optional: an importer that also reads the trials of the other tuner."""

    def read_history(self, path: Path) -> History:
        """Return the trials in a file. Raises UsageError if it is not a history."""
