"""What the search calls: a strategy, a store of trials, and a listener for events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from flagcore.domain.experience import Features, PastMeasurements
from flagcore.domain.knob import Knobs
from flagcore.domain.prediction import Predictions
from flagcore.domain.search_state import SearchTime
from flagcore.domain.space import IntArray, Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """What a strategy sees when the next trial is to be chosen.

    `open_rows` (never empty) are rows of `space` that no rule removed and no trial settled. `trials` is one a
    candidate, in order; `probes` were probed where trials run. `features` gives what errors of predictions may depend
    on for some rows, and `past` is what trials of other runs were measured at. `seconds_left` is None without a limit.
    `pending` are trials that run now: their candidates are not open, and a strategy should choose what adds to them.
    """

    task: Task
    space: Space
    predictions: Predictions
    open_rows: IntArray
    trials: Sequence[Trial]
    features: Callable[[IntArray], Features]
    past: PastMeasurements
    seconds_left: float | None = None
    probes: Sequence[Trial] = ()
    pending: Sequence[Trial] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The row to try next, or None to stop; `because` is the reason, in one line.

    `belief` is what the strategy expects of it now, as plain data in the format of predictions.
    """

    row: int | None
    because: str
    belief: Mapping[str, object] = field(default_factory=dict)


class Strategy(Protocol):
    """The order in which candidates are tried."""

    name: str

    def next(self, context: SearchContext) -> Choice:
        """Return what to try next."""


class TrialStore(Protocol):
    """Trials that survive a kill. A finished trial is stored once and never changes."""

    def trials(self) -> tuple[Trial, ...]:
        """Return every finished trial in order."""

    def begin(self, planned: Trial) -> Trial:
        """Store that a trial starts, and return it running, with its number and log."""

    def finish(self, trial: Trial) -> None:
        """Store the outcome of a trial."""

    def folder(self, trial: Trial) -> str:
        """Return the absolute path of the trial's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that the user may want to see. The command line draws it, tests count it.

    `kind` is trial_started, trial_waits (others use its devices; its `reason` names them) or trial_finished;
    `seconds_left` estimates the rest of the run, repeats included. `objective` is that of the run, `knobs` are those of
    its task. `search_time`, only of the first event, is how long all trials may take. `note` is a line for the user.
    """

    kind: str
    trial: Trial
    trials_finished: int
    trials_planned: int
    seconds_left: float | None
    best: Trial | None
    objective: str = ""
    knobs: Knobs = field(default_factory=dict)
    search_time: SearchTime | None = None
    note: str = ""


OnEvent: TypeAlias = Callable[[Event], None]
"""Receives one event; what it raises ends the run."""
