"""Reads the journal of a run without Optuna and without writing, also if lines of it are damaged."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flagcore.domain.files import read_regular
from flagcore.domain.records import read_belief, read_prediction
from flagcore.domain.space import Candidate
from flagcore.domain.trial import FIDELITIES, Trial, TrialState, checked
from flagcore.errors import RunError
from flagcore.i18n import _

JOURNAL = "journal.log"
MAX_BYTES, MAX_GAP = 1 << 28, 1000
"""The maximum size of a journal, in which a trial takes about 5 KB, and of a gap in the numbers of its trials."""
_adapter = cache(TypeAdapter)  # made on first use, because it takes long
MAX_INT = 2**63 - 1
CREATE_STUDY, CREATE_TRIAL, SET_STATE, SET_ATTRIBUTE = 0, 4, 6, 8
"""The operations that flagcore writes, as in `JournalOperation` of `optuna.storages.journal`."""
OTHERS = (2, 3, 5, 7, 9)
"""Operations of Optuna's tools that do not change a trial's result."""
MAX_LISTED = 8


@dataclass(slots=True, kw_only=True)
class Journal:
    """The content of a journal.

    - `run`: the name of the run. Empty if it cannot be read.
    - `created`: the numbers of the trials whose start was stored, in the order of the lines.
    - `trials`: the trials that have ended, by number.
    - `started`: the trials without an end, by number.
    - `lost`: the numbers of the trials that cannot be read.
    - `damaged`, `misplaced`: the numbers of lines that cannot be read, and of lines that are doubled or out of order.
    """

    run: str = ""
    created: list[int] = field(default_factory=list)
    trials: dict[int, Trial] = field(default_factory=dict)
    started: dict[int, Trial] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    misplaced: set[int] = field(default_factory=set)
    _starts: dict[int, dict[str, Any]] = field(default_factory=dict)
    _ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)
    _places: dict[int, list[int]] = field(default_factory=dict)

    @property
    def is_intact(self) -> bool:
        """Whether Optuna reads the same trials from it."""
        return not self.damaged and not self.misplaced and self.created == [*range(len(self.created))]

    def notes(self, place: Path | str, restored: Iterable[int]) -> list[str]:
        """Return a sentence on the damage at `place`, or nothing.

        `restored`: the numbers of the trials that are taken from result.json.
        """
        numbers = {
            _("damaged lines"): self.damaged,
            _("lines that are doubled or out of order"): self.misplaced,
            _("trials taken from result.json"): {*restored},
            _("lost trials"): self.lost.difference(restored),
        }
        parts = [f"{name}: {_listed(found)}" for name, found in numbers.items() if found]
        return [f"{place}: {'; '.join(parts)}"] if parts else []

    def add(self, line: bytes, place: int) -> None:
        """Read the line with the number `place`. If the line was cut, an entry at its end is read."""
        try:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                self.damaged.add(place)
                entry = json.loads(line[max(0, line.rfind(b'{"op_code"')) :])
            is_placed = self._add(entry, place)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            self.damaged.add(place)
        else:
            if not is_placed:
                self.misplaced.add(place)

    def _add(self, entry: Mapping[str, Any], place: int) -> bool:
        """Add an entry, unless it is doubled. Return whether it is the next one that belongs to its trial."""
        operation, _worker = entry["op_code"], entry["worker_id"]
        if operation == CREATE_STUDY:
            name = str(entry["study_name"])  # Optuna writes it again whenever the run is resumed
            is_next, self.run = self.run == name or not (self.run or self.created), self.run or name
            return is_next and bool(entry["directions"])
        if operation == CREATE_TRIAL:
            return self._start(entry, place)
        if operation in OTHERS:
            return True
        number = self._number(entry["trial_id"], place)
        is_next = number in self._starts and number not in self._closed
        if operation == SET_ATTRIBUTE:
            if "result" in entry["user_attr"]:
                is_next = is_next and number not in self._ends
                self._ends.setdefault(number, {**entry["user_attr"]["result"]})
            return is_next
        if operation != SET_STATE:
            raise ValueError(operation)
        self._closed.add(number)
        return is_next

    def _start(self, entry: Mapping[str, Any], place: int) -> bool:
        """Add the start of a trial, unless it is doubled. Return whether it is the next trial of this run."""
        attributes = {"number": len(self.created), **entry["user_attrs"]}
        number, expected = self._number(attributes["number"], place), 1 + (self.created or [-1])[-1]
        if number in self._starts or entry["study_id"] != 0:
            return False
        self.created.append(number)
        self._starts[number] = attributes
        return number >= expected and number not in self._ends and bool(self.run)

    def _number(self, number: object, place: int) -> int:
        if type(number) is not int or not 0 <= number < len(self.created) + MAX_GAP:
            raise ValueError(number)
        self._places.setdefault(number, []).append(place)
        return number

    def close(self, folders: Iterable[int]) -> None:
        """Read the trials after all lines. `folders`: the numbers of the trials that have a folder."""
        for number, attributes in self._starts.items():
            end = self._ends.get(number)
            if "candidate" not in attributes or (end is None and number in self._closed):
                continue
            try:
                trials = self.started if end is None else self.trials
                trials[number] = read_trial(number, {**attributes, "result": end or {}})
            except (LookupError, TypeError, ValueError, AttributeError):
                self.damaged.update(self._places[number])
        known = [each for each in folders if each < len(self.created) + MAX_GAP]
        size = 1 + max((*self._places, *known), default=-1)
        self.lost = {*range(size)} - self.trials.keys() - self.started.keys()


def read_journal(folder: Path, run: str) -> Journal:
    """Return the content of the journal of the run named `run`. It is empty if there is no journal.

    Trials of which only a folder is left are lost. Raises RunError if the journal is not a file, is too large, or
    belongs to another run.
    """
    file, journal = folder / JOURNAL, Journal()
    folders = [int(each.name) for each in folder.glob("trials/*") if each.name.isdecimal()]
    try:
        data = read_regular(file, MAX_BYTES, folder)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise RunError(_("{file} cannot be read ({why})", file=file, why=error.strerror)) from None
    lines = data.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    else:
        journal.damaged.add(len(lines))  # its end was not written
    for place, line in enumerate(lines, 1):
        journal.add(line, place)
    journal.close(folders)
    if journal.run not in ("", run):
        text = _(
            "{file} has the trials of the run {other}, not of {run}; restore task.json, or use --new to start over",
            file=file,
            other=journal.run,
            run=run,
        )
        raise RunError(text)
    return journal


def read_trial(number: int, attributes: Mapping[str, Any]) -> Trial:
    """Convert the attributes of a trial in the study to a trial, as failed if its readings cannot be.

    Raises ValueError, LookupError, TypeError or AttributeError if they are invalid.
    """
    attributes = dict(attributes)
    result, values = attributes.pop("result", {}), attributes["candidate"]
    for knob, value in values.items():
        if not isinstance(value, (int, str, type(None))) or (isinstance(value, int) and abs(value) > MAX_INT):
            raise ValueError(f"trial {number} has {knob} = {value}, which is not a valid value")
    if predicted := attributes.get("predicted"):
        predicted = read_prediction(predicted)
    attributes |= {"predicted": predicted or None, "believed": read_belief(attributes.get("believed") or {})}
    unfinished = {"state": TrialState.RUNNING, "log": f"trials/{number}/stdout.log"}
    given = {**unfinished, **attributes, **result, "number": number, "candidate": Candidate.of(values)}
    trial = _adapter(Trial).validate_python(given)
    if trial.state is TrialState.MEASURED and not trial.measurement:
        raise ValueError(f"trial {number} was measured, but has no figures")
    if trial.fidelity not in FIDELITIES:
        raise ValueError(f"trial {number} has the fidelity {trial.fidelity}")
    return checked(trial)


def _listed(numbers: Iterable[int]) -> str:
    """Return numbers in order, with ranges for those that follow one another. A long list is cut."""
    ranges = list[list[int]]()
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    texts = ["-".join(map(str, each)) for each in ranges]
    omitted = [_("and {count} more", count=len(texts) - MAX_LISTED)] if len(texts) > MAX_LISTED else []
    return ", ".join([*texts[:MAX_LISTED], *omitted])
