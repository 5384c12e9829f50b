"""Importers: files of another tuner become a spec, or trials. Entry points of the group `flagcore.importers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flagcore.domain.candidate import KnobValue
from flagcore.errors import SpecError


@dataclass(frozen=True, slots=True)
class ImportNote:
    """The conversion of a key of the other tuner. `at` is the key of the spec that it is about; empty: none."""

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
        """Return an error of the spec with the key that the other tuner's file has."""

    def as_yaml(self) -> str:
        """Return the spec as YAML, with the notes as comments."""


class Importer(Protocol):
    """Reads the configuration of another tuner."""

    name: str
    title: str
    """How the other tuner writes its own name."""

    def read_tree(self, directory: Path, name: str, overrides: Sequence[str] = ()) -> ImportedSpec:
        """Return the configuration `name` in `directory`, with `overrides` (a.b=c). Raises SpecError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One trial of another tuner. `line` is its line in the file, from 1 for the heading; `index` its number.

    `step_s` is the mean of a training step in seconds, `figures` are those of a server by flagcore's names; `error`
    gives the reason if there are none. `split` is whether the first or last pipeline stage has another number of
    layers, `cut` whether the tuner ended the trial early. `refused` is the reason why the row cannot be used, empty if
    it can.
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
    """Trials in the order in which they ran, and whether they are of servers."""

    rows: tuple[HistoryRow, ...]
    serves: bool


@runtime_checkable
class HistoryReader(Protocol):
    """Optional: an importer that also reads the other tuner's trials."""

    def read_history(self, path: Path) -> History:
        """Return the trials in a file. Raises UsageError if it is not a history."""
