"""The search problem, and the interfaces of search strategies and of watchers, which receive the events of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from flagcore.contracts.engine import Engine, Platform
from flagcore.contracts.plugin import Costs, PruningRule
from flagcore.domain.features import Features, PastMeasurements, features
from flagcore.domain.knob import Knobs
from flagcore.domain.plan import SearchTime
from flagcore.domain.prediction import Belief, Predictions
from flagcore.domain.space import LEARNED_MESSAGES, Candidate, IntArray, Legality, Pruned, Space
from flagcore.domain.spec import JobRecord, Task
from flagcore.domain.trial import RunEvent, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The search problem of a spec.

    `predictions`: the predictions of all candidates, in the order of the rows of `space`.
    `rules`: the pruning rules of the engine and of plugins.
    `pruned`: the candidates that were removed by `rules`, or by rules that the search has learned from trials.
    `knobs`: the knobs of the engine and of plugins, by name.
    `usual_baseline`: whether the engine's usual space, or the spec, has the baseline.
    `adds_baseline`: whether the space that the spec describes does not contain the baseline.
    `published`: the published training runs on the chips, the nearest first, each as a job and as its record.
    """

    platform: Platform
    legality: Legality
    space: Space
    predictions: Predictions
    pruned: Pruned
    baseline: Candidate
    rules: tuple[PruningRule, ...] = ()
    knobs: Knobs = field(default_factory=dict)
    adds_baseline: bool = False
    usual_baseline: bool = True
    published: tuple[tuple[JobRecord, Mapping[str, Any]], ...] = ()

    @property
    def task(self) -> Task:
        """The spec and its cluster."""
        return self.platform.task

    @property
    def engine(self) -> Engine:
        """The engine of the job."""
        return self.platform.engine

    @property
    def costs(self) -> Costs:
        """The cost models of the cluster."""
        return self.platform.costs

    def row_of(self, candidate: Candidate) -> int:
        """Return the row of `candidate`, which must be in the space."""
        row = self.space.find(candidate)
        assert row is not None, "every candidate that runs is in the space"
        return row

    def columns_of(self, candidate: Candidate) -> dict[str, IntArray]:
        """Return one-row columns of `candidate`, which must be in the space."""
        return self.space.columns(np.array([self.row_of(candidate)]))

    @property
    def messages(self) -> dict[str, str]:
        """The message of each rule by name: legality rules, pruning rules, and rules learned from trials."""
        legality = {rule.name: rule.message for rule in (*self.legality.rules, *self.legality.bounds)}
        return legality | {rule.name: rule.message for rule in self.rules} | LEARNED_MESSAGES

    def set_knobs(self, candidate: Candidate) -> Candidate:
        """Return `candidate` without the knobs that have their neutral value."""
        neutral = {axis.knob: axis.neutral for axis in self.legality.axes}
        return Candidate(tuple(item for item in candidate.items if item[1] != neutral[item[0]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The input of a strategy.

    `open_rows`: the rows of `space` that can be tried. There is at least one.
    `trials`: one trial per candidate, in the order in which they ran.
    `past`: measurements of other tasks.
    `seconds_left`: the remaining time. None if there is no limit.
    `probes`: the probes of candidates, if trials are runs.
    `pending`: the trials that are running. Their candidates are not in `open_rows`.
    """

    problem: Problem
    open_rows: IntArray
    trials: Sequence[Trial]
    past: PastMeasurements
    seconds_left: float | None = None
    probes: Sequence[Trial] = ()
    pending: Sequence[Trial] = ()

    @property
    def task(self) -> Task:
        """The spec and its cluster."""
        return self.problem.task

    @property
    def space(self) -> Space:
        """The legal candidates."""
        return self.problem.space

    @property
    def predictions(self) -> Predictions:
        """The predictions of the rows of `space`."""
        return self.problem.predictions

    def features(self, rows: IntArray) -> Features:
        """Return the features of the candidates in `rows`. The errors of predictions are learned from them."""
        columns, engine = self.space.columns(rows), self.problem.engine
        sizes = engine.sizes(self.task.for_engine(), columns)
        return features(self.space.axes, columns, self.predictions.take(rows), sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy's choice of the next candidate.

    `row`: the candidate's row, or None to stop the search.
    `because`: the reason for the choice in one line.
    `belief`: the strategy's corrected prediction for the candidate. None if it has none.
    """

    row: int | None
    because: str
    belief: Belief | None = None


class Strategy(Protocol):
    """A search strategy, which determines the order in which candidates are tried."""

    name: str

    def next(self, context: SearchContext) -> Choice:
        """Return the candidate to try next, or the decision to stop."""


LEADERS = 3
"""The maximum number of trials that an event reports as the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of the search, for the display of progress.

    `kind`: trial_started, trial_waits or trial_finished. A trial waits if other programs use its devices. Its `reason`
    then names them.
    `seconds_left`: an estimate of the remaining seconds of the run, including repeats. None if unknown.
    `objective`, `knobs`: the objective and the knobs of the task.
    `elapsed_s`: the seconds that the run has taken, including earlier calls of a resumed run.
    `leaders`: the fastest measured trials within the limits, at most LEADERS of different candidates, the best first.
    `repeats`: the numbers of finished and of planned repeats, if the trial is a repeat.
    `steps`: at the start of a trial, a function that returns the numbers of its finished and planned steps so far. None
    if its program reports no steps.
    `search_time`: only in the first event.
    `note`: a line for the user.
    `stop`: a function without arguments that ends the search. Running trials end first, and finalists are not repeated.
    """

    kind: str
    trial: Trial
    trials_finished: int
    trials_planned: int
    seconds_left: float | None
    best: Trial | None
    objective: str = ""
    knobs: Knobs = field(default_factory=dict)
    elapsed_s: float = 0.0
    leaders: tuple[Trial, ...] = ()
    repeats: tuple[int, int] | None = None
    steps: Callable[[], tuple[int, int]] | None = None
    search_time: SearchTime | None = None
    note: str = ""
    stop: Callable[[], None] = lambda: None


class Watcher(Protocol):
    """Receives the events of runs, for `flag tune --watch`. It is a module or an object."""

    def on_event(self, event: RunEvent) -> object:
        """Receive an event.

        Each watcher runs in a separate thread and receives one event after the other. Trials do not wait for it. An
        exception is reported, and the watcher still receives the next event. A watcher that needs more than 30 seconds
        for an event receives no more events.
        """


OnEvent: TypeAlias = Callable[[Event], None]
"""A function that receives events. If it raises an exception, the run ends."""
