"""The progress of a search: its trials in the store, what they teach, and the events about them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flagcore.contracts import Event, OnEvent, Problem
from flagcore.domain.trial import RUN, Trial, TrialState
from flagcore.tuner.budget import Budget, seconds_left
from flagcore.tuner.feasibility import search_time
from flagcore.tuner.parallel import Parallelism
from flagcore.tuner.problem import with_learned
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import untried

if TYPE_CHECKING:
    from flagcore.tuner.store import OptunaStore  # importing optuna is slow


class Progress:
    """The trials of a search: kept in the store, learned from, and reported to the listener.

    `problem`: the problem with what the trials taught. `state`: the state of the search after them.
    `is_stopped`: whether the listener has called `Event.stop`.
    """

    def __init__(
        self, problem: Problem, store: OptunaStore, budget: Budget, parallel: Parallelism, on_event: OnEvent
    ) -> None:
        self.problem, self.store, self.budget, self.parallel, self.on_event = problem, store, budget, parallel, on_event
        self.fidelity, self.is_stopped = budget.control.fidelity, False
        own_trials = [each for each in store.trials() if each.fidelity == self.fidelity and not each.source]
        failed = {each.number for each in own_trials if each.state is TrialState.FAILED}
        self._retried = set() if any(each.measurement for each in own_trials) else failed
        """Failed trials of earlier calls that measured nothing. Their cause may be gone, so they are tried again."""
        self._search_time = search_time(problem) if self.fidelity == RUN else None
        """The estimated time of all trials. The first event reports it; it is None afterwards."""
        self._learn()

    @property
    def candidates(self) -> int:
        """The number of candidates that have a trial or may get one."""
        return len(self.state.settled) + len(untried(self.problem, self.state))

    def begin(self, planned: Trial) -> Trial:
        """Store the start of a trial and report it. Return it with its number."""
        trial = self.store.begin(planned)
        self.emit("trial_started", trial)
        return trial

    def finish(self, trial: Trial) -> None:
        """Store the outcome of a trial, learn from it, and report it."""
        self.store.finish(trial)
        self._learn()
        self.emit("trial_finished", trial)

    def _learn(self) -> None:
        stored = self.store.trials()
        trials = [replace(each, inconclusive=True) if each.number in self._retried else each for each in stored]
        self.state = learn(trials, self.fidelity)
        problem = with_learned(self.problem, self.state.trials)
        self.problem = replace(problem, pruned=prune_by_trials(problem, self.state.trials, self.state.probes))

    def stop(self) -> None:
        """Start no further trials."""
        self.is_stopped = True

    def emit(self, kind: str, trial: Trial) -> None:
        """Send an event of a trial to the listener. The search time and the note are sent only once."""
        control, candidates = self.budget.control, self.candidates
        left = seconds_left(control, self.state, candidates, self.budget.elapsed, self.parallel.pool.limit)
        self.on_event(
            Event(
                kind=kind,
                trial=trial,
                trials_finished=len(self.state.settled),
                trials_planned=min(control.max_trials, candidates),
                seconds_left=left,
                best=self.state.best,
                objective=self.problem.task.spec.objective,
                knobs=self.problem.knobs,
                search_time=self._search_time,
                note=self.parallel.note,
                stop=self.stop,
            )
        )
        self._search_time, self.parallel.note = None, ""
