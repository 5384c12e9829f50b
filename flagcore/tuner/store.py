"""Stores trials in an Optuna study, so that Optuna's tools can read them."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.trial import FrozenTrial, create_trial
from optuna.trial import TrialState as OptunaState
from pydantic import TypeAdapter

from flagcore.domain.files import open_regular, read_regular, writable
from flagcore.domain.records import prediction_record, read_belief, read_prediction
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import is_rate, objective_value
from flagcore.domain.trial import Trial, TrialState, checked
from flagcore.errors import RunError
from flagcore.i18n import _

JOURNAL = "journal.log"
TRIAL = TypeAdapter(Trial)
ENDED = ("source", "inconclusive", "lost_host", "warm", "finished_steps_s", "silent_s", "telemetry")
"""The fields of a trial that are set when it ends, besides its state, reason, duration, log and measurement."""
MAX_INT = 2**63 - 1
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
    ) -> None:
        """Open or create the study `run`. `choices`: all values of each knob in the space, by name.

        The study is stored in a journal in the folder `path`, or in the Optuna storage at `url`.
        """
        optuna.logging.set_verbosity(logging.ERROR)
        self._path, self._objective = path, objective
        self._distributions = {knob: CategoricalDistribution(tuple(values)) for knob, values in choices.items()}
        self._where = url or str(path / JOURNAL)
        with self._errors_as_run_error():
            if url is None:
                _drop_incomplete_line(path / JOURNAL)
            self._storage = optuna.storages.get_storage(url or open_journal(path / JOURNAL))
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=run,
                load_if_exists=True,
                direction="maximize" if is_rate(objective) else "minimize",
            )
            self._identifier = self._storage.get_study_id_from_name(run)
            self._close_interrupted()
            self.trials()

    def trials(self) -> tuple[Trial, ...]:
        return _finished(self._study)

    def begin(self, planned: Trial) -> Trial:
        """Store the start of a planned trial, create its folder, and return it with its number and log."""
        values = planned.candidate.as_dict()
        attributes = {
            "candidate": values,
            "role": planned.role.value,
            "fidelity": planned.fidelity,
            "predicted": prediction_record(planned.predicted) if planned.predicted else {},
            **planned.search_fields,
        }
        params = {knob: values[knob] for knob in self._distributions if knob in values}
        template = create_trial(
            state=OptunaState.RUNNING,
            params=params,
            distributions={knob: self._distributions[knob] for knob in params},
            user_attrs=attributes,
        )
        with self._errors_as_run_error():
            number = self._storage.get_trial_number_from_id(self._storage.create_new_trial(self._identifier, template))
            log = f"trials/{number}/stdout.log"
            trial = dataclasses.replace(planned, number=number, state=TrialState.RUNNING, log=log)
            Path(self.folder(trial)).mkdir(0o700, parents=True, exist_ok=True)  # its files may contain secrets
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
                reason = "flagcore ended during the trial"
                self.finish(dataclasses.replace(trial, state=TrialState.INTERRUPTED, reason=reason))


def stored_trials(path: Path, run: str, url: str | None = None) -> tuple[Trial, ...]:
    """Return the finished trials of the study `run` in the folder `path`, or in the Optuna storage at `url`.

    The study is only read, so the run may still be active. Returns no trials if there is no journal. Raises RunError.
    """
    optuna.logging.set_verbosity(logging.ERROR)
    file = path / JOURNAL
    if url is None and not file.exists():
        return ()
    try:
        if url is None:
            open_regular(file).close()
        storage = optuna.storages.get_storage(url or open_journal(file))
        return _finished(optuna.load_study(study_name=run, storage=storage))
    except KeyError:
        if url is None:
            return ()
        message = _(
            "{url} has no trials of this run; a relative path in it starts at the working folder of the tuning", url=url
        )
        raise RunError(message) from None
    except Exception as error:
        raise RunError(_("{file} cannot be read ({why})", file=url or file, why=_line(error))) from None


def _finished(study: optuna.Study) -> tuple[Trial, ...]:
    frozen = study.get_trials(deepcopy=False)
    return tuple(from_frozen(each) for each in frozen if "result" in each.user_attrs)


def _drop_incomplete_line(file: Path) -> None:
    """Remove an incomplete last line from a journal, and the lock of its writer.

    Such a line remains if the writer was killed or the disk was full.
    """
    file.with_name(file.name + ".lock").unlink(missing_ok=True)
    if file.exists():
        data = read_regular(file, max_bytes=1 << 40)
        size = data.rfind(b"\n") + 1
        if size != len(data):
            with file.open("r+b") as journal:
                journal.truncate(size)


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
    """Convert an entry of the study to a trial, as failed if its readings cannot be.

    Raises ValueError or KeyError if the entry is invalid.
    """
    attributes = dict(frozen.user_attrs)
    result, values = attributes.pop("result", {}), attributes["candidate"]
    for knob, value in values.items():
        if not isinstance(value, (int, str, type(None))) or (isinstance(value, int) and abs(value) > MAX_INT):
            raise ValueError(f"trial {frozen.number} has {knob} = {value}, which is not a valid value")
    if predicted := attributes.get("predicted"):
        predicted = read_prediction(predicted)
    attributes |= {"predicted": predicted or None, "believed": read_belief(attributes.get("believed") or {})}
    unfinished = {"state": TrialState.RUNNING, "log": f"trials/{frozen.number}/stdout.log"}
    trial = TRIAL.validate_python(
        {**unfinished, **attributes, **result, "number": frozen.number, "candidate": Candidate.of(values)}
    )
    if trial.state is TrialState.MEASURED and not trial.measurement:
        raise ValueError(f"trial {frozen.number} was measured, but has no figures")
    return checked(trial)


def _line(error: Exception) -> str:
    message = getattr(error, "strerror", None) or str(error)
    return " ".join(message.split())[:200] or type(error).__name__
