"""Plans the trials of a search, keeps and reports them, learns from them, and says why none starts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flagcore.contracts import LEADERS, Choice, Event, OnEvent, Problem, SearchContext
from flagcore.domain.features import PastMeasurements
from flagcore.domain.space import Candidate
from flagcore.domain.trial import RUN, Role, Trial, TrialState
from flagcore.errors import HostLost
from flagcore.i18n import N_, Message, _
from flagcore.tuner.budget import Budget, has_time_to_repeat, seconds_left, stop_reason, why_no_trial
from flagcore.tuner.feasibility import search_time
from flagcore.tuner.parallel import Hosts, Parallelism
from flagcore.tuner.problem import with_learned
from flagcore.tuner.search_state import min_repeats
from flagcore.tuner.shorten import shortened_steps
from flagcore.tuner.stages.learn import learn
from flagcore.tuner.stages.measure import compare
from flagcore.tuner.stages.predict import predict_stage_layers, with_figures
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import search_context, untried

STOPPED = N_("stopped by the program that called flagcore")
"""The reason why the search ended, if a listener called `Event.stop`."""


def predicted_trial(problem: Problem, candidate: Candidate, role: Role, fidelity: str) -> Trial:
    """Return a new trial of a candidate, with its prediction."""
    layers = predict_stage_layers(problem.platform, problem.columns_of(candidate))
    return Trial(
        number=0,
        candidate=candidate,
        role=role,
        state=TrialState.RUNNING,
        predicted=with_figures(problem.task, problem.predictions.row(problem.row_of(candidate)), layers.get(0, ())),
        fidelity=fidelity,
    )


class Planner(NamedTuple):
    """Plans trials with what is left: candidates, time, devices and hosts. `past`: measurements of other tasks."""

    progress: Progress
    budget: Budget
    parallel: Parallelism
    hosts: Hosts
    past: PastMeasurements

    @property
    def may_start(self) -> bool:
        """Whether trials may start: the search was not stopped, and not too many trials were inconclusive."""
        return not self.progress.is_stopped and not self.hosts.are_busy

    def stop_reason(self) -> str | None:
        """Return why no further trial starts, or None if one may."""
        if self.progress.is_stopped:
            return STOPPED
        if self.hosts.are_busy:
            text = N_("in {count} consecutive trials, devices were busy, processes were stopped or a host failed")
            return Message(text, count=self.hosts.consecutive_busy)
        control, state = self.budget.control, self.progress.state
        no_trial = why_no_trial(self.context()) if control.fidelity == RUN else None
        return no_trial or stop_reason(control, state, self.budget.elapsed, len(self.parallel.pending))

    def may_compare(self) -> bool:
        """Return whether a further trial may start, and several candidates are left."""
        return self.stop_reason() is None and self.context().open_rows.size > 1

    def is_done(self, baseline: Candidate) -> bool:
        """Return whether the baseline already has a trial of this run, or cannot be probed."""
        problem, state = self.progress.problem, self.progress.state
        if baseline in state.settled and not state.by_candidate[baseline].source:
            return True
        step_time_s = problem.predictions.step_time_s[problem.row_of(baseline)]
        return self.budget.control.fidelity != RUN and not np.isfinite(step_time_s)

    @property
    def nodes_left(self) -> int | None:
        """The nodes for the next trial if hosts were lost. None if enough usable hosts are left."""
        spec = self.parallel.platform.task.spec
        if spec.cluster.min_nodes is None:
            return None
        usable = len(self.hosts.launcher.usable_hosts(spec.cluster.hosts))
        sizes = [nodes for nodes in spec.sizes if nodes <= usable] or spec.sizes[:1]
        return None if usable >= spec.trial_nodes else sizes[-1]

    def can_repeat(self, trial: Trial) -> bool:
        """Return whether there are time and nodes to repeat a trial."""
        has_nodes = self.may_start and self.hosts.can_run(trial.candidate, self.nodes_left)
        return has_nodes and has_time_to_repeat(self.budget.control, trial, self.budget.elapsed)

    def context(self) -> SearchContext:
        """Return the input of the strategy."""
        problem, state, left = self.progress.problem, self.progress.state, self.budget.seconds_left
        context = search_context(problem, state, self.past, left, self.parallel.pending)
        context = replace(context, open_rows=self.hosts.rows(context.open_rows, self.nodes_left))
        return context if self.budget.control.fidelity == RUN else _only_with_predicted_time(context)

    def context_for_probes(self, probed: Collection[Candidate]) -> SearchContext:
        """Return the context for choosing a probe: without the trials of runs, and without the probed candidates."""
        context = self.context()
        probed_rows = [row for candidate in probed if (row := context.space.find(candidate)) is not None]
        open_rows = np.setdiff1d(context.open_rows, np.array(probed_rows, dtype=np.int64))
        interrupted = [trial for trial in self.progress.state.probes if trial.state is TrialState.INTERRUPTED]
        return _only_with_predicted_time(replace(context, trials=interrupted, open_rows=open_rows))

    def plan(
        self,
        candidate: Candidate,
        role: Role,
        choice: Choice | None = None,
        *,
        fidelity: str | None = None,
        search_ended: str | None = None,
    ) -> Trial:
        """Return a trial of a candidate with its prediction, time limit and shortened steps.

        Raises HostLost if the candidate cannot run on the nodes that are left.
        """
        fidelity, problem = fidelity or self.budget.control.fidelity, self.progress.problem
        trial = replace(
            predicted_trial(problem, candidate, role, fidelity),
            began_s=self.budget.elapsed,
            chosen_because=choice.because if choice else None,
            believed=choice.belief if choice else None,
            search_ended=search_ended,
            group=self.parallel.group,
        )
        if fidelity == RUN:
            nodes = self.nodes_left
            if not self.hosts.can_run(candidate, nodes):
                raise HostLost("", _("the candidate cannot run on the {nodes} nodes that are left", nodes=nodes))
            trial = replace(trial, shortened=shortened_steps(problem, trial, nodes))
        limit = self.budget.time_limit(problem, trial, self.progress.state, self.progress.candidates)
        return replace(trial, time_limit=limit)


def _only_with_predicted_time(context: SearchContext) -> SearchContext:
    """Return `context` without the open rows that have no predicted time: probes do not run communication."""
    has_time = np.isfinite(context.predictions.step_time_s[context.open_rows])
    return replace(context, open_rows=context.open_rows[has_time])


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
        """Check the answers of a trial, store its outcome, learn from it, and report it."""
        base, folder = self.state.baseline, self.store.folder
        if base and trial.fidelity == RUN and self.problem.task.spec.control.answers is not None:
            trial = compare(self.problem.platform, trial, base, (folder(trial), folder(base)))
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
                elapsed_s=self.budget.elapsed,
                leaders=self.state.leaders(LEADERS),
                repeats=self._repeats() if trial.role is Role.REPEAT else None,
                steps=self._steps_of(trial) if kind == "trial_started" else None,
                search_time=self._search_time,
                note=self.parallel.note,
                stop=self.stop,
            )
        )
        self._search_time, self.parallel.note = None, ""

    def _repeats(self) -> tuple[int, int]:
        """Return the numbers of finished and of planned repeats. A repeat may be added to those that were planned."""
        done = sum(each.is_conclusive for each in self.state.repeats)
        return done, max(sum(min_repeats(self.budget.control, self.state).values()), done + 1)

    def _steps_of(self, trial: Trial) -> Callable[[], tuple[int, int]] | None:
        """Return a function that returns the finished and the planned steps of a trial that starts, if it has steps."""
        control, task = self.budget.control, self.problem.task
        if not task.spec.work.has_steps or trial.fidelity != RUN:
            return None
        steps = self.problem.engine.steps(task, self.store.folder(trial))
        return lambda: (min(len(steps.times()), control.train_iters), control.train_iters)
