"""Stores trials in an Optuna study, so that Optuna's tools can read them."""

import dataclasses
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as OptunaState

from flagcore.domain.files import writable
from flagcore.domain.records import prediction_record
from flagcore.domain.secrets import redact_text
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import is_rate, objective_value
from flagcore.domain.trial import Trial, TrialState
from flagcore.errors import RunError
from flagcore.i18n import N_, _
from flagcore.tuner.journal import JOURNAL, Journal, read_journal, read_trial

ENDED = ("source", "inconclusive", "lost_host", "warm", "finished_steps_s", "silent_s", "telemetry")
"""The fields of a trial that are set when it ends, besides its state, reason, duration, log and measurement."""
STATES = {TrialState.MEASURED: OptunaState.COMPLETE, TrialState.STOPPED: OptunaState.PRUNED}


class OptunaStore:
    """The trials of one run. The process must have locked the run directory.

    Three journal entries are written for a trial: when it starts, when it ends (with all its data), and for Optuna's
    tools. If the process is killed while a trial runs, the trial becomes interrupted when the store is opened again.
    """

    def __init__(
        self,
        path: Path,
        choices: Mapping[str, Sequence[KnobValue]],
        *,
        run: str,
        objective: str = "tokens_per_second_per_device",
        url: str | None = None,
        saved: Sequence[Trial] = (),
    ) -> None:
        """Open or create the study `run`. `choices`: all values of each knob in the space, by name.

        The study is stored in a journal in the folder `path`, or in the Optuna storage at `url`. A damaged journal is
        written anew, and a copy of it is kept. `saved`: the trials of the result of the run. They are added if the
        study lacks them. `notes` describes the damage.
        """
        optuna.logging.set_verbosity(logging.ERROR)
        self._path, self._objective, self._run = path, objective, run
        self._distributions = {knob: CategoricalDistribution(tuple(values)) for knob, values in choices.items()}
        self._where = url or str(path / JOURNAL)
        with self._errors_as_run_error():
            if url is None:
                self.notes = self._open_journal(path / JOURNAL, saved)
            else:
                self._open(optuna.storages.get_storage(url))
                missing = {each.number: each for each in saved if each.number >= self._size}
                self._write(missing, ())
                self.notes = Journal().notes(redact_text(url), missing)
            self._close_interrupted()
            self.trials()

    def _open(self, storage: BaseStorage) -> None:
        self._storage = storage
        self._study = optuna.create_study(
            storage=storage,
            study_name=self._run,
            load_if_exists=True,
            direction="maximize" if is_rate(self._objective) else "minimize",
        )
        self._identifier = storage.get_study_id_from_name(self._run)
        self._size = storage.get_n_trials(self._identifier)

    def _open_journal(self, file: Path, saved: Sequence[Trial]) -> list[str]:
        """Open the journal, and add the trials that only the result has. Return what was damaged.

        A journal that is damaged before its end is written anew, because Optuna only appends to it.
        """
        for suffix in (".lock", ".new", ".new.lock"):  # of a process that was killed
            file.with_name(file.name + suffix).unlink(missing_ok=True)
        journal = read_journal(self._path, self._run)
        first = len(journal.created)
        missing = {each.number: each for each in saved if each.number not in journal.trials}
        trials = {**journal.started, **missing, **journal.trials}
        notes, is_intact = journal.notes(file, missing), journal.is_intact and all(n >= first for n in missing)
        if is_intact:
            try:
                self._open(open_journal(file))
            except (LookupError, TypeError, ValueError, AttributeError, AssertionError):
                is_intact = False
        if not is_intact:
            copy, draft = file.with_name(f"{file.name}.{time.strftime('%Y%m%d-%H%M%S')}"), Path(f"{file}.new")
            self._open(open_journal(draft))
            self._write(trials, journal.lost)
            shutil.copyfile(file, copy)
            os.replace(draft, file)
            self._open(open_journal(file))
            notes.append(_("{file} was damaged and is written anew; the old one is {copy}", file=file, copy=copy))
        else:
            self._write(trials, journal.lost)
        return notes

    def _write(self, trials: Mapping[int, Trial], lost: Iterable[int]) -> None:
        """Store the trials that the study does not have yet. Lost ones keep their number."""
        for number in range(self._size, 1 + max((*trials, *lost), default=-1)):
            trial = trials.get(number)
            if trial is None:
                entry = create_trial(state=OptunaState.FAIL, user_attrs={"number": number})
                self._storage.create_new_trial(self._identifier, entry)
                self._size = number + 1
            elif trial.state is TrialState.RUNNING:
                self.begin(trial)
            else:
                self.add(trial)

    def trials(self) -> tuple[Trial, ...]:
        return _finished(self._study)

    def begin(self, planned: Trial) -> Trial:
        """Store the start of a planned trial, create its folder, and return it with its number and log."""
        values = planned.candidate.as_dict()
        attributes = {
            "number": self._size,
            "candidate": values,
            "role": planned.role.value,
            "fidelity": planned.fidelity,
            "predicted": prediction_record(planned.predicted) if planned.predicted else {},
            **planned.search_fields,
        }
        spaces = self._distributions.items()
        params = {knob: values[knob] for knob, space in spaces if knob in values and values[knob] in space.choices}
        template = create_trial(
            state=OptunaState.RUNNING,
            params=params,
            distributions={knob: self._distributions[knob] for knob in params},
            user_attrs=attributes,
        )
        with self._errors_as_run_error():
            number = self._storage.get_trial_number_from_id(self._storage.create_new_trial(self._identifier, template))
            self._size, log = number + 1, f"trials/{number}/stdout.log"
            trial = dataclasses.replace(planned, number=number, state=TrialState.RUNNING, log=log)
            Path(self.folder(trial)).mkdir(0o700, parents=True, exist_ok=True)  # its files may contain secrets
            if os.path.realpath(folder := self.folder(trial)) != folder:
                raise RunError(_("{folder} is a link; remove it, or use --run-dir for another folder", folder=folder))
        return trial

    def add(self, trial: Trial) -> Trial:
        """Store an imported trial, and return it with its number and log."""
        begun = self.begin(trial)
        stored = dataclasses.replace(trial, number=begun.number, log=begun.log)
        self.finish(stored)
        return stored

    def finish(self, trial: Trial) -> None:
        with self._errors_as_run_error():
            identifier = self._storage.get_trial_id_from_study_id_trial_number(self._identifier, trial.number)
            self._storage.set_trial_user_attr(identifier, "result", _result(trial))
            self._close_in_optuna(trial)

    def folder(self, trial: Trial) -> str:
        return str(self._path.resolve() / "trials" / str(trial.number))

    @contextmanager
    def _errors_as_run_error(self) -> Iterator[None]:
        """Convert errors of the storage, such as a corrupt journal, to RunError."""
        with writable(self._path):
            try:
                yield
            except (OSError, RunError):
                raise
            except Exception as error:
                location, reason = self._where, _line(error)
                text = _(
                    "{file} cannot be used ({why}); repair it, or use --new to start over", file=location, why=reason
                )
                raise RunError(text) from None

    def _close_in_optuna(self, trial: Trial) -> None:
        identifier = self._storage.get_trial_id_from_study_id_trial_number(self._identifier, trial.number)
        measured = trial.measurement
        state = STATES.get(trial.state, OptunaState.FAIL)
        values = None
        if measured and state is OptunaState.COMPLETE:
            values = [objective_value(self._objective, measured.step_time_s, measured)]
        self._storage.set_trial_state_values(identifier, state, values)

    def _close_interrupted(self) -> None:
        for frozen in self._study.get_trials(deepcopy=False):
            if frozen.state is not OptunaState.RUNNING:
                continue
            trial = from_frozen(frozen)
            if "result" in frozen.user_attrs:
                self._close_in_optuna(trial)
            else:
                reason = N_("flagcore ended during the trial")
                self.finish(dataclasses.replace(trial, state=TrialState.INTERRUPTED, reason=reason))


def stored_trials(run: str, url: str) -> tuple[Trial, ...]:
    """Return the finished trials of the study `run` in the Optuna storage at `url`. Raises RunError."""
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        return _finished(optuna.load_study(study_name=run, storage=optuna.storages.get_storage(url)))
    except KeyError:
        message = _(
            "{url} has no trials of this run; a relative path in it starts at the working folder of the tuning", url=url
        )
        raise RunError(message) from None
    except Exception as error:
        raise RunError(_("{file} cannot be read ({why})", file=url, why=_line(error))) from None


def _finished(study: optuna.Study) -> tuple[Trial, ...]:
    return tuple(from_frozen(each) for each in study.get_trials(deepcopy=False) if "result" in each.user_attrs)


def open_journal(file: Path) -> JournalStorage:
    """Open the storage of a journal. The file is created if it is missing."""
    return JournalStorage(JournalFileBackend(str(file), lock_obj=JournalFileOpenLock(str(file))))


def _result(trial: Trial) -> dict[str, Any]:
    data = {
        "state": trial.state.value,
        "reason": trial.reason,
        "duration_s": trial.duration_s,
        "log": trial.log,
        "measurement": dataclasses.asdict(trial.measurement) if trial.measurement else None,
        **{name: value for name in ENDED if (value := getattr(trial, name))},
    }
    return json.loads(json.dumps(data, default=str))  # type: ignore[no-any-return]


def from_frozen(frozen: FrozenTrial) -> Trial:
    """Convert an entry of the study to a trial. Raises the errors of `read_trial`."""
    return read_trial(frozen.number, frozen.user_attrs)


def _line(error: Exception) -> str:
    message = getattr(error, "strerror", None) or str(error)
    return " ".join(message.split())[:200] or type(error).__name__
