"""Importers, which convert files of another tuner to a spec or to trials.

They are registered in the entry point group `flagcore.importers`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flagcore.domain.chip import Chip
from flagcore.domain.space import Axis, Candidate, KnobValue
from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial
from flagcore.errors import SpecError


@dataclass(frozen=True, slots=True)
class ImportNote:
    """A note on how a key of the other tuner was converted.

    `at`: the key path of the spec that the note is about. Empty if there is none.
    """

    key: str
    text: str
    at: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A program that a command or file starts: its words, its environment variables with known values, the devices per
    host (None if unknown), the number of hosts, and the number of copies.

    `version`: the engine release in the tag of the container image. `script`: the script that contains the command.
    `job`: the environment variables that the batch system sets for the script.
    """

    words: tuple[str, ...] = ()
    envs: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None
    hosts: int = 1
    instances: int = 1
    version: str = ""
    script: tuple[str, ...] = ()
    job: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSpec:
    """An imported spec as plain data with absolute paths, and notes on keys that are dropped or changed.

    `file`: the file that was read. Empty if there is none.
    """

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]
    file: str = ""

    def translate_error(self, error: SpecError) -> SpecError:
        """Return an error about a key of the spec as an error about the key of the imported file. By default, it is
        unchanged.
        """
        return error


class Importer(Protocol):
    """Reads the configuration of another tuner."""

    name: str
    title: str
    """The name of the other tuner in messages."""
    has_trees: bool
    """Whether a configuration is a directory of hydra files, which `flag tune --config-path` also reads.

    Otherwise it is one file, or the name of a recipe.
    """

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedSpec:
        """Return the configuration `name` in `directory`. Raises SpecError.

        `overrides`: changes of its keys, such as `a.b=c`.
        `chips`: a function that returns the chips of all plugins.
        """


FindCandidate = Callable[[Mapping[str, KnobValue]], Candidate]
"""Returns the candidate with the given values of knobs. Raises UsageError if it is not in the space."""


@runtime_checkable
class HistoryReader(Protocol):
    """An optional interface of importers that can also read the other tuner's trials."""

    def read_history(
        self, path: Path, task: Task, axes: Sequence[Axis], find: FindCandidate
    ) -> tuple[tuple[Trial, ...], tuple[str, ...]]:
        """Return the trials in a file in the order in which they ran, and notes on skipped rows and columns.

        `task`: the job that was tuned.
        `axes`: the knobs of its space.
        `find`: a function that takes knob values and returns the candidate with these values. The trials have no
        predictions, and their numbers are not used. Raises UsageError if the file does not contain trials of this kind
        of job.
        """
