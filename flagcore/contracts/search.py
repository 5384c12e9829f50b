"""The problem of a search, its strategies, and its events."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from flagcore.contracts.platform import Costs, Platform, PruningRule
from flagcore.contracts.workload import Workload
from flagcore.domain.effects import engine_task
from flagcore.domain.knob import Knobs
from flagcore.domain.prediction import Features, PastMeasurements, Predictions, features
from flagcore.domain.search_state import LEARNED_MESSAGES, Pruned, SearchTime
from flagcore.domain.space import Candidate, IntArray, Legality, Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The search problem of a spec.

    `rules` are the pruning rules of the engine and of plugins, `pruned` what they removed; before any trial, unless the
    search has learned from trials. `knobs` are the knobs of both, by name.
    """

    platform: Platform
    legality: Legality
    space: Space
    predictions: Predictions
    pruned: Pruned
    baseline: Candidate
    rules: tuple[PruningRule, ...] = ()
    knobs: Knobs = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The job of the spec and its cluster."""
        return self.platform.task

    @property
    def workload(self) -> Workload:
        """The engine of the job."""
        return self.platform.workload

    @property
    def costs(self) -> Costs:
        """The cost models of the cluster."""
        return self.platform.costs

    def row_of(self, candidate: Candidate) -> int:
        """Return the row of a candidate of the space."""
        row = self.space.find(candidate)
        assert row is not None, "every candidate that runs is in the space"
        return row

    def columns_of(self, candidate: Candidate) -> dict[str, IntArray]:
        """Return the columns of the row of a candidate of the space."""
        return self.space.columns(np.array([self.row_of(candidate)]))

    @property
    def messages(self) -> dict[str, str]:
        """The message of each rule by name: legality rules, pruning rules, and rules that are learned from trials."""
        legality = {rule.name: rule.message for rule in self.legality.rules}
        return legality | {rule.name: rule.message for rule in self.rules} | LEARNED_MESSAGES

    def set_knobs(self, candidate: Candidate) -> Candidate:
        """Return a candidate without the knobs that have their neutral value."""
        neutral = {axis.knob: axis.neutral for axis in self.legality.axes}
        return Candidate(tuple(item for item in candidate.items if item[1] != neutral[item[0]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """The input of a strategy.

    `open_rows` are the rows of `space` that can be tried; there is at least one. `trials` has one trial per candidate,
    in order; `probes` are probes if trials are runs. `past` has measurements of other runs. `seconds_left` is the
    remaining time; None: no limit. `pending` are the trials that run now; their candidates are not open.
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
        """The job of the spec and its cluster."""
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
        """Return the features of rows on which the errors of predictions may depend."""
        columns, workload = self.space.columns(rows), self.problem.workload
        sizes = workload.sizes(engine_task(self.task), columns)
        return features(self.space.axes, columns, self.predictions.take(rows), sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The row to try next, or None to stop the search, and the reason in one line.

    `belief` is the strategy's current prediction for the row, as plain data in the format of predictions.
    """

    row: int | None
    because: str
    belief: Mapping[str, object] = field(default_factory=dict)


class Strategy(Protocol):
    """The order in which candidates are tried."""

    name: str

    def next(self, context: SearchContext) -> Choice:
        """Return what to try next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of the search, for the display of progress.

    `kind` is trial_started, trial_waits or trial_finished. A trial waits if other programs use its devices, and its
    `reason` names them. `seconds_left` is an estimate of the rest of the run, including repeats. `objective` is the
    objective of the run, `knobs` are the knobs of its task. `search_time` is given for the first event only. `note` is
    a line for the user.
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
"""A function that receives events. An exception ends the run."""
