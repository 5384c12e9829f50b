"""The studies of all runs below a folder as one storage that Optuna's tools can only read."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, NoReturn

import optuna
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as OptunaState

from flagcore.domain.files import open_regular
from flagcore.domain.secrets import redact_text
from flagcore.domain.trial import Trial
from flagcore.errors import RunError
from flagcore.tuner.store.directory import IDENTITY, RunDirectory
from flagcore.tuner.store.trials import JOURNAL, from_frozen, open_journal

MAX_DEPTH = 3
"""Runs are searched this number of folders below the root."""
RESULT = "result.json"
TRIALS_OF_RUN = 1 << 32
"""The ids of a study's trials start at its own id times this number, so that ids of trials are unique."""
FIGURES = ("step_time_s", "tokens_per_second_per_device", "device_used_bytes")
"""The fields of a measurement that Optuna's tools show."""


@dataclass(eq=False)
class Study:
    """The study of the run in `folder`. `name` is the folder relative to the root."""

    identifier: int
    name: str
    folder: Path
    journal: int
    """The inode of the journal: `flag tune --new` writes another file."""
    storage: JournalStorage
    source: int
    """The id of the study in `storage`."""
    direction: StudyDirection
    spec: Mapping[str, Any]
    """The spec of the run as plain data."""
    ended: dict[int, tuple[Trial, FrozenTrial]] = field(default_factory=dict)

    def trials(self) -> list[tuple[Trial, FrozenTrial]]:
        """Return all trials in order, also those that run. Optuna gets a few figures and the knobs that vary."""
        found = []
        for frozen in self.storage.get_all_trials(self.source, deepcopy=False):
            pair = self.ended.get(frozen.number)
            if pair is None:
                trial = from_frozen(frozen)
                pair = trial, self._public(trial, frozen)
                if "result" in frozen.user_attrs and frozen.state.is_finished():
                    self.ended[frozen.number] = pair
            found.append(pair)
        return found

    def _public(self, trial: Trial, frozen: FrozenTrial) -> FrozenTrial:
        measured = trial.measurement
        figures = {name: getattr(measured, name) for name in FIGURES} if measured else {}
        about = {
            "state": trial.state.value,
            "role": trial.role.value,
            "fidelity": trial.fidelity,
            "reason": redact_text(trial.reason) if trial.reason else None,
            **figures,
        }
        varied = {name for name, kind in frozen.distributions.items() if len(kind.choices) > 1}
        return FrozenTrial(
            number=frozen.number,
            state=frozen.state,
            value=None,
            values=frozen.values,
            datetime_start=frozen.datetime_start,
            datetime_complete=frozen.datetime_complete,
            params={name: value for name, value in frozen.params.items() if name in varied},
            distributions={name: frozen.distributions[name] for name in varied},
            user_attrs={name: value for name, value in about.items() if value is not None},
            system_attrs={},
            intermediate_values={},
            trial_id=self.identifier * TRIALS_OF_RUN + frozen.number,
        )


class Studies(BaseStorage):  # type: ignore[misc]
    """The studies of the runs below `root`. Links are not followed, and nothing is written.

    Runs with another storage than their journal have no study here.
    """

    def __init__(self, root: Path) -> None:
        optuna.logging.set_verbosity(logging.ERROR)
        self.root = root.resolve()
        self._lock = RLock()
        self._studies: dict[str, Study] = {}
        self._identifiers: dict[str, int] = {}

    def folders(self) -> dict[str, Path]:
        """Return the folders of all runs by name, in alphabetical order."""
        with self._lock:
            found = {str(each.relative_to(self.root)): each for each in _run_folders(self.root, MAX_DEPTH)}
            return {self.root.name if name == "." else name: found[name] for name in sorted(found)}

    def study(self, name: str, folder: Path) -> Study | None:
        """Return the study of a run, None if it has no journal. Raises RunError if it cannot be read."""
        with self._lock:
            file = folder / JOURNAL
            try:
                inode = os.lstat(file).st_ino
                known = self._studies.get(name)
                if known is None or known.journal != inode:
                    known = self._open(name, folder, inode)
            except FileNotFoundError:
                return None
            except RunError:
                raise
            except Exception as error:
                raise RunError(f"{file} cannot be read ({error})") from None
            if known is not None:
                self._studies[name] = known
            return known

    def _open(self, name: str, folder: Path, inode: int) -> Study | None:
        identity = RunDirectory(folder).identity()
        if (folder / JOURNAL).is_symlink() or identity is None or identity["fixed"].get("storage"):
            return None
        open_regular(folder / JOURNAL).close()  # opening a pipe would wait for its writer
        storage = open_journal(folder / JOURNAL)
        try:
            source = storage.get_study_id_from_name(identity["run"])
        except KeyError:
            return None
        return Study(
            identifier=self._identifiers.setdefault(name, len(self._identifiers)),
            name=name,
            folder=folder,
            journal=inode,
            storage=storage,
            source=source,
            direction=storage.get_study_directions(source)[0],
            spec=_spec(identity["task"]),
        )

    def _readable(self) -> list[Study]:
        found = []
        for name, folder in self.folders().items():
            try:
                study = self.study(name, folder)
            except RunError:
                continue
            if study is not None:
                found.append(study)
        return found

    def _by_id(self, study_id: int) -> Study:
        for study in self._readable():
            if study.identifier == study_id:
                return study
        raise KeyError("no such study")

    def get_all_studies(self) -> list[FrozenStudy]:
        with self._lock:
            return [FrozenStudy(each.name, each.direction, {}, {}, each.identifier) for each in self._readable()]

    def get_study_id_from_name(self, study_name: str) -> int:
        for study in self._readable():
            if study.name == study_name:
                return study.identifier
        raise KeyError("no such study")

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._by_id(study_id).name

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return [self._by_id(study_id).direction]

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return {}

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return {}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[OptunaState] | None = None
    ) -> list[FrozenTrial]:
        with self._lock:
            trials = [public for _, public in self._by_id(study_id).trials()]
        return [each for each in trials if states is None or each.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        study_id, number = divmod(trial_id, TRIALS_OF_RUN)
        return self.get_all_trials(study_id)[number]

    def _read_only(self, *arguments: object, **named: object) -> NoReturn:
        raise RuntimeError("the studies of a dashboard can only be read")

    create_new_study = delete_study = set_study_user_attr = set_study_system_attr = _read_only
    create_new_trial = set_trial_param = set_trial_state_values = set_trial_intermediate_value = _read_only
    set_trial_user_attr = set_trial_system_attr = _read_only


def _spec(task: Any) -> Mapping[str, Any]:
    spec = task.get("spec") if isinstance(task, Mapping) else None
    return spec if isinstance(spec, Mapping) else {}


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of runs in a folder, without links. Folders that cannot be read are skipped."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    if files & {IDENTITY, RESULT}:
        yield folder
    if depth and IDENTITY not in files:  # a run of several engines has a folder for each
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _run_folders(folder / entry.name, depth - 1)
