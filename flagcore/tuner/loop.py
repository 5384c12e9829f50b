"""The whole loop: discover, build, predict, prune, rank, launch, measure, learn, until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from flagcore.contracts import Choice, Event, Launcher, OnEvent, Problem, SearchContext, Strategy, Workload
from flagcore.domain.plan import Plan
from flagcore.domain.prediction import PastMeasurements
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Spec
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, TimeLimit, Trial, TrialState
from flagcore.errors import FlagError, HostLost, Interrupted, LaunchError
from flagcore.i18n import N_, Message, _
from flagcore.plugins import LoadedPlugins
from flagcore.tuner.budget import has_time_to_repeat, next_repeat, seconds_left, stop_reason
from flagcore.tuner.devices import divide, parallel_probe_ranks, require_devices
from flagcore.tuner.feasibility import dry_run, may_fit, require_candidate, require_predicted_time, search_time
from flagcore.tuner.problem import build_problem, require_launchable, with_learned
from flagcore.tuner.search_state import SearchState, summarize
from flagcore.tuner.stages.launch import nodes_left
from flagcore.tuner.stages.learn import interference, learn, measured_alone
from flagcore.tuner.stages.limit import cap_limit, seconds_used, share_of_time, why_no_trial, with_target
from flagcore.tuner.stages.prune import prune_by_trials
from flagcore.tuner.stages.rank import rank, search_context, untried
from flagcore.tuner.stages.shorten import SmallerTask
from flagcore.tuner.trial_runner import TrialPool, TrialRunner, plan_shortened_steps, plan_time_limit, predicted_trial

if TYPE_CHECKING:
    from flagcore.tuner.store.trials import OptunaStore  # importing optuna is slow

MAX_SHARE_OF_PROBES = 0.5
"""The maximum share of `control.max_time` for probes before the first run."""

STOPPED = N_("stopped by the program that called flagcore")
"""The reason why the search ended, if a listener called `Event.stop`."""

MAX_CONSECUTIVE_BUSY = 3
"""The search stops after this number of consecutive trials whose devices were busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The objects that the loop calls. `probe_strategy` chooses the candidates to probe before the first run."""

    plugins: LoadedPlugins
    workload: Workload
    launcher: Launcher
    strategy: Strategy
    probe_strategy: Strategy
    open_store: Callable[[Problem], OptunaStore]
    on_event: OnEvent
    past: Callable[[Problem], PastMeasurements] = lambda problem: PastMeasurements.empty()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The plan and the problem of a search, and the error that stopped it early, or None."""

    plan: Plan
    problem: Problem
    error: FlagError | None


def tune(spec: Spec, dependencies: Dependencies) -> TuneResult:
    """Find the fastest candidate by running or probing candidates, or from predictions alone.

    Finished trials are stored even if an exception is raised.
    """
    started = time.monotonic()  # on a busy machine, building the problem takes a part of the time
    fidelity = spec.control.fidelity
    problem = build_problem(spec, dependencies.plugins, dependencies.workload)
    if fidelity != RUN or not may_fit(problem):
        require_candidate(problem)
    if fidelity != RUN:
        require_predicted_time(problem)
    if fidelity == ESTIMATE:
        dependencies.open_store(problem)
        return TuneResult(plan=dry_run(problem), problem=problem, error=None)
    require_launchable(problem)
    require_devices(problem.platform, dependencies.plugins.devices(spec.envs), needed=1 if fidelity == PROBE else None)
    search = _Search(problem, dependencies, started)
    error: FlagError | None = None
    try:
        stopped = search.run()
    except KeyboardInterrupt:
        search.interrupt(N_("interrupted by the user"))
        stopped, error = N_("interrupted"), Interrupted(_("interrupted"))
    except LaunchError as failure:
        search.interrupt(str(failure))
        stopped, error = str(failure), failure
    finally:
        tuple(search.pool.stop(""))
        dependencies.launcher.close()
    plan = summarize(problem.task, problem.space, search.problem.pruned, search.state, stopped, problem.knobs)
    return TuneResult(plan=replace(plan, interference=search.interference), problem=problem, error=error)


class _Search:
    """One call of `tune`: the problem, the store, the running trials, and the state of the search."""

    def __init__(self, problem: Problem, dependencies: Dependencies, started: float) -> None:
        self.problem, self.dependencies, self.store = problem, dependencies, dependencies.open_store(problem)
        self.device_groups, self.note = divide(problem.platform)
        self.pool = TrialPool()
        self.is_parallelism_decided = len(self.device_groups) == 1
        self.runner = TrialRunner(
            problem=problem,
            launcher=dependencies.launcher,
            store=self.store,
            device_groups=self.device_groups,
            probe_devices=parallel_probe_ranks(problem.platform),
            pool=self.pool,
        )
        control = problem.task.spec.control
        self.fidelity = control.fidelity
        self.control = control if self.fidelity == RUN else replace(control, repeats=0)
        counted = [trial for trial in self.store.trials() if trial.fidelity == self.fidelity or control.probes]
        self.seconds_before = seconds_used([trial for trial in counted if not trial.source])
        self.started = started
        self.state, self.past = SearchState(), dependencies.past(problem)
        self.consecutive_busy = 0
        """Consecutive trials that were inconclusive, such as those whose devices were busy or that lost a host."""
        self.loss: str | None = None
        """If the last trial lost a host, the host and the reason."""
        stored_trials = self.store.trials()
        own_trials = [each for each in stored_trials if each.fidelity == self.fidelity and not each.source]
        failed = {each.number for each in own_trials if each.state is TrialState.FAILED}
        self.retried = set() if any(each.measurement for each in own_trials) else failed
        """Failed trials of earlier calls that measured nothing. Their cause may be gone, so they are tried again."""
        cut_off = (self.store.folder(each) for each in stored_trials if each.state is TrialState.INTERRUPTED)
        dependencies.launcher.resume(filter(None, (each.lost_host for each in stored_trials)), cut_off)
        known = np.isfinite(problem.predictions.step_time_s)  # steps with fewer replicas are scaled by predictions
        self.can_run_on = cache(
            lambda nodes: known & SmallerTask(problem.platform, nodes).runs(problem.space.columns())
        )
        """For a number of nodes, which rows of the space can run on them with fewer replicas."""
        self.lacks_nodes = False
        """Whether the search ended because the open candidates need nodes that were lost."""
        self.is_stopped = False
        """Whether a listener has called `Event.stop`."""
        self.search_time = search_time(problem) if self.fidelity == RUN else None
        """The estimated time of all trials. The first event reports it; it is None afterwards."""
        self._learn()

    @property
    def elapsed(self) -> float:
        """The seconds that this run has taken, including earlier calls of a resumed run."""
        return self.seconds_before + time.monotonic() - self.started

    def run(self) -> str:
        """Probe, search, and repeat the finalists. Return why the search stopped.

        Raises HostLost if it stopped because hosts were lost.
        A search does not continue once repeats have begun, even if the run is resumed.
        """
        self._run_probes()
        search_ended = next((each.search_ended for each in self.state.repeats if each.search_ended), None)
        search_ended = search_ended or self._run_candidates()
        if not self.lacks_nodes:
            self._repeat_finalists(search_ended)
        if self.lacks_nodes or (self.consecutive_busy >= MAX_CONSECUTIVE_BUSY and self.loss):
            raise HostLost("", ": ".join(filter(None, (search_ended, self.loss))))
        return search_ended

    def _run_probes(self) -> None:
        """Probe `control.probes` candidates in the first MAX_SHARE_OF_PROBES of `control.max_time`."""
        if self.fidelity != RUN:
            return
        while len(probed := self._probed()) < self.control.probes and self._seconds_for_probes() > 0:
            if not self._may_start:
                return
            choice = rank(self.dependencies.probe_strategy, self._context_for_probes(probed))
            if choice.row is None:
                return
            self._run(self._plan(self.problem.space.candidate(choice.row), Role.SEARCH, choice, fidelity=PROBE))

    def _run_candidates(self) -> str:
        """Run the baseline, then the candidates that the strategy chooses. Return why no further trial starts."""
        baseline = self.problem.baseline
        while self._may_start and not self._is_baseline_done(baseline):
            self._run(self._plan(baseline, Role.BASELINE))
        while True:
            self._decide_parallelism()
            reason = self._start_trials()
            if not self.pool.trials:
                self.pool.limit = 1
                return reason
            self._finish(self.pool.next_finished())

    def _repeat_finalists(self, search_ended: str) -> None:
        """Run the baseline, the best candidate and its rivals again in turn, to reduce the effect of noise.

        `search_ended` is the reason why the search stopped, which is stored with each repeat.
        """
        while trial := next_repeat(self.control, self.state):
            is_possible = self._may_start and self._has_nodes(trial.candidate)
            if not is_possible or not has_time_to_repeat(self.control, trial, self.elapsed):
                return
            planned = self._plan(trial.candidate, Role.REPEAT, search_ended=search_ended)
            if trial in self.state.disturbed:
                because = Message(N_("other programs used cores during trial {number}"), number=trial.number)
                planned = replace(planned, chosen_because=because)
            self._run(planned)

    def _start_trials(self) -> str:
        """Start trials on free groups of devices. Return why no further trial may start, or an empty string."""
        self.lacks_nodes = False
        while self.pool.free_device_group is not None:
            if (reason := self._stop_reason()) is not None:
                return reason
            context, nodes = self._context(), self._nodes_left
            choice = rank(self.dependencies.strategy, context)
            if choice.row is None:
                open_rows = untried(self.problem, self.state, self._pending)
                self.lacks_nodes = bool(nodes and open_rows.size and not context.open_rows.size)
                text = N_("no other candidate can run on the {nodes} nodes that are left")
                return Message(text, nodes=nodes) if self.lacks_nodes else choice.because
            self._start(self._plan(self.problem.space.candidate(choice.row), Role.SEARCH, choice))
        return ""

    def _decide_parallelism(self) -> None:
        """Allow parallel trials on all groups of devices, unless trials disturb each other.

        To measure the interference, the first candidate that was measured alone runs again while other trials run.
        """
        trial_alone, interference = measured_alone(self.state.trials), self.interference
        is_measuring = any(trial.role is Role.INTERFERENCE for trial in self.pool.trials)
        if self.is_parallelism_decided or trial_alone is None or is_measuring:
            return
        if interference:
            self.is_parallelism_decided, self.note = True, interference.text
            self.pool.limit = len(self.device_groups) if interference.is_negligible else 1
        elif self.pool.trials:  # the interference trial failed because other programs used its devices
            self.pool.limit = 1
        elif self._stop_reason() is None and self._context().open_rows.size > 1:
            self.pool.limit = len(self.device_groups)
            self._start(self._plan(trial_alone.candidate, Role.INTERFERENCE))

    def _is_baseline_done(self, baseline: Candidate) -> bool:
        """Return whether the baseline already has a trial of this run, or cannot be probed."""
        trial = self.state.by_candidate.get(baseline)
        is_done = baseline in self.state.settled and not (trial and trial.source)
        step_time_s = self.problem.predictions.step_time_s[self.problem.row_of(baseline)]
        return is_done or (self.fidelity != RUN and not np.isfinite(step_time_s))

    @property
    def _may_start(self) -> bool:
        """Whether trials may start: nobody has stopped the search, and not too many trials were inconclusive."""
        return not self.is_stopped and self.consecutive_busy < MAX_CONSECUTIVE_BUSY

    def stop(self) -> None:
        """Start no further trials."""
        self.is_stopped = True

    def _stop_reason(self) -> str | None:
        if self.is_stopped:
            return STOPPED
        if self.consecutive_busy >= MAX_CONSECUTIVE_BUSY:
            text = N_("in {count} consecutive trials, devices were busy, processes were stopped or a host failed")
            return Message(text, count=self.consecutive_busy)
        no_trial = why_no_trial(self._context()) if self.fidelity == RUN else None
        return no_trial or stop_reason(self.control, self.state, self.elapsed, len(self._pending))

    @property
    def _pending(self) -> list[Trial]:
        """The running trials with the role SEARCH."""
        return [trial for trial in self.pool.trials if trial.role is Role.SEARCH]

    @property
    def _nodes_left(self) -> int | None:
        return nodes_left(self.device_groups[self.pool.free_device_group or 0], self.dependencies.launcher)

    def _has_nodes(self, candidate: Candidate) -> bool:
        """Return whether a candidate can run on the hosts that are still usable."""
        nodes = self._nodes_left
        return nodes is None or bool(self.can_run_on(nodes)[self.problem.row_of(candidate)])

    def _probed(self) -> frozenset[Candidate]:
        return frozenset(each.candidate for each in self.state.probes if each.is_conclusive)

    def _seconds_for_probes(self) -> float:
        limit = self.control.max_time
        return math.inf if limit is None else limit * MAX_SHARE_OF_PROBES - self.elapsed

    def _context(self) -> SearchContext:
        limit = self.control.max_time
        seconds_left = None if limit is None else limit - self.elapsed
        context = search_context(self.problem, self.state, self.past, seconds_left, self._pending)
        if nodes := self._nodes_left:
            context = replace(context, open_rows=context.open_rows[self.can_run_on(nodes)[context.open_rows]])
        return context if self.fidelity == RUN else _only_with_predicted_time(context)

    def _context_for_probes(self, probed: frozenset[Candidate]) -> SearchContext:
        """Return the context for choosing a probe: without the trials of runs, and without the probed candidates."""
        context = self._context()
        probed_rows = [row for candidate in probed if (row := context.space.find(candidate)) is not None]
        open_rows = np.setdiff1d(context.open_rows, np.array(probed_rows, dtype=np.int64))
        interrupted = [trial for trial in self.state.probes if trial.state is TrialState.INTERRUPTED]
        return _only_with_predicted_time(replace(context, trials=interrupted, open_rows=open_rows))

    def _run(self, planned: Trial) -> None:
        """Run a trial and wait for its end."""
        self._start(planned)
        self._finish(self.pool.next_finished())

    def _start(self, planned: Trial) -> None:
        trial = self.store.begin(planned)
        self._emit("trial_started", trial)
        best = self.state.best if trial.role is Role.SEARCH else None
        run = partial(self.runner.run, best=best, on_wait=partial(self._emit, "trial_waits"))
        self.pool.start(trial, run)

    def interrupt(self, reason: str) -> None:
        """Interrupt all running trials and store them with `reason`."""
        for trial in self.pool.stop(reason):
            self._finish(trial)

    def _plan(
        self,
        candidate: Candidate,
        role: Role,
        choice: Choice | None = None,
        *,
        fidelity: str | None = None,
        search_ended: str | None = None,
    ) -> Trial:
        """Return a trial of a candidate with its prediction, time limit and shortened steps."""
        fidelity = fidelity or self.fidelity
        trial = replace(
            predicted_trial(self.problem, candidate, role, fidelity),
            began_s=self.elapsed,
            chosen_because=choice.because if choice else None,
            believed=choice.belief if choice else None,
            search_ended=search_ended,
            group=self.pool.free_device_group if self.pool.limit > 1 else None,
        )
        if fidelity == RUN:
            nodes = self._nodes_left
            if not self._has_nodes(candidate):
                raise HostLost("", _("the candidate cannot run on the {nodes} nodes that are left", nodes=nodes))
            trial = replace(trial, shortened=plan_shortened_steps(self.problem, trial, nodes))
        return replace(trial, time_limit=self._time_limit(trial))

    def _time_limit(self, trial: Trial) -> TimeLimit:
        """Return the time limit of a trial: at most the time that is left for the run, or for the probes before it."""
        earlier = (*self.state.trials, *self.state.repeats)
        limit, seconds_left = plan_time_limit(self.problem, trial, earlier), None
        if max_time := self.control.max_time:
            is_early_probe = trial.fidelity == PROBE and self.fidelity == RUN
            seconds_left = self._seconds_for_probes() if is_early_probe else max_time - self.elapsed
            limit = cap_limit(limit, seconds_left, f"auto_tuner.control.max_time = {max_time:g} s")
        if trial.fidelity == PROBE:
            return limit
        share = share_of_time(self.control, self.state, trial.role, self._candidates, seconds_left)
        return with_target(limit, self.problem.task, trial, share, earlier)

    @property
    def _candidates(self) -> int:
        """The number of candidates that have a trial or may get one."""
        return len(self.state.settled) + len(untried(self.problem, self.state))

    def _finish(self, trial: Trial) -> None:
        self.store.finish(trial)
        self.loss, cluster = trial.reason if trial.lost_host else None, self.problem.task.spec.cluster
        if not (trial.lost_host and (cluster.spares or cluster.min_nodes)):
            self.consecutive_busy = self.consecutive_busy + 1 if trial.inconclusive else 0
        self._learn()
        self._emit("trial_finished", trial)

    def _learn(self) -> None:
        stored = self.store.trials()
        trials = [replace(each, inconclusive=True) if each.number in self.retried else each for each in stored]
        self.state, self.interference = learn(trials, self.fidelity), interference(trials)
        problem = with_learned(self.problem, self.state.trials)
        self.problem = replace(problem, pruned=prune_by_trials(problem, self.state.trials, self.state.probes))

    def _emit(self, kind: str, trial: Trial) -> None:
        """Send an event of a trial to the listener. The search time and the note are sent only once."""
        candidates = self._candidates
        self.dependencies.on_event(
            Event(
                kind=kind,
                trial=trial,
                trials_finished=len(self.state.settled),
                trials_planned=min(self.control.max_trials, candidates),
                seconds_left=seconds_left(self.control, self.state, candidates, self.elapsed, self.pool.limit),
                best=self.state.best,
                objective=self.problem.task.spec.objective,
                knobs=self.problem.knobs,
                search_time=self.search_time,
                note=self.note,
                stop=self.stop,
            )
        )
        self.search_time, self.note = None, ""


def _only_with_predicted_time(context: SearchContext) -> SearchContext:
    """Return `context` without the open rows that have no predicted time: probes do not run communication."""
    has_time = np.isfinite(context.predictions.step_time_s[context.open_rows])
    return replace(context, open_rows=context.open_rows[has_time])
