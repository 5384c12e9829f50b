"""The whole loop: discover, build, predict, prune, rank, launch, measure, learn, until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flagcore.attempt import Attempts
from flagcore.contracts import (
    Choice,
    Event,
    KeepsProcesses,
    Launcher,
    OnEvent,
    Plugins,
    SearchContext,
    Strategy,
    TrialStore,
    Workload,
)
from flagcore.domain.candidate import Candidate
from flagcore.domain.chip import Device
from flagcore.domain.experience import Past
from flagcore.domain.interference import interference, measured_alone
from flagcore.domain.plan import Plan, summarize
from flagcore.domain.search_state import cold_repeat, has_time_to_repeat, next_repeat, seconds_left, stop_reason
from flagcore.domain.spec import Spec
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, TimeLimit, Trial, TrialState
from flagcore.dry_run import dry_run, require_predicted_time
from flagcore.errors import FlagError, Interrupted, LaunchError
from flagcore.i18n import N_, Message, _
from flagcore.in_flight import InFlight
from flagcore.problem import Problem, build_problem, require_candidate, require_launchable
from flagcore.stages.discover import present, side_by_side
from flagcore.stages.divide import divide
from flagcore.stages.learn import learn
from flagcore.stages.limit import capped
from flagcore.stages.prune import prune
from flagcore.stages.rank import rank, search_context
from flagcore.trial_plan import limit_of, predicted_trial, shortened_steps, time_of_search

MAX_SHARE_OF_PROBES = 0.5
"""Probes before the first run may take this share of `control.max_time`."""

MAX_BUSY = 3
"""The search stops when the devices of so many consecutive trials were busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What the loop calls.

    `probe_strategy` chooses what is probed before the first run, by default `strategy`.
    """

    plugins: Plugins
    workload: Workload
    launcher: Launcher
    strategy: Strategy
    open_store: Callable[[Problem], TrialStore]
    on_event: OnEvent
    past: Callable[[Problem], Past] = lambda problem: Past.empty()
    probe_strategy: Strategy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """The result of a tune, and the error that stopped it early, if any."""

    plan: Plan
    problem: Problem
    error: FlagError | None


def tune(spec: Spec, uses: Dependencies) -> TuneResult:
    """Find the fastest configuration by running candidates, by probing them, or from predictions alone.

    Trials that finished are stored even if this raises.
    """
    fidelity = spec.control.fidelity
    problem = build_problem(spec, uses.plugins, uses.workload)
    require_candidate(problem)
    if fidelity != RUN:
        require_predicted_time(problem)
    if fidelity == ESTIMATE:
        uses.open_store(problem)
        return TuneResult(plan=dry_run(problem), problem=problem, error=None)
    require_launchable(problem, uses.workload)
    devices = uses.plugins.devices()
    present(problem.platform, devices, needed=1 if fidelity == PROBE else None)
    search = _Search(problem, uses, devices)
    error: FlagError | None = None
    try:
        search.probe_first()
        stopped = search.run()
        search.repeat(stopped)
    except KeyboardInterrupt:
        search.interrupt(N_("interrupted by the user"))
        stopped, error = N_("interrupted"), Interrupted(_("interrupted"))
    except LaunchError as failure:
        search.interrupt(str(failure))
        stopped, error = str(failure), failure
    finally:
        tuple(search.running.stop(""))
        if isinstance(uses.launcher, KeepsProcesses):
            uses.launcher.close()
    plan = summarize(problem.platform.task, problem.space, search.pruned, search.state, stopped, problem.knobs)
    return TuneResult(plan=replace(plan, interference=search.interference), problem=problem, error=error)


class _Search:
    """One call of `tune`: the problem, the store, the trials that run, and the state of the search."""

    def __init__(self, problem: Problem, uses: Dependencies, devices: tuple[Device, ...]) -> None:
        self.problem, self.uses, self.store = problem, uses, uses.open_store(problem)
        self.groups, self.note = divide(problem.platform, devices)
        self.running = InFlight()
        self.judged = len(self.groups) == 1
        """Whether it is known if trials run side by side."""
        self.attempts = Attempts(
            problem=problem,
            workload=uses.workload,
            launcher=uses.launcher,
            store=self.store,
            groups=self.groups,
            probe_devices=side_by_side(problem.platform, devices),
            running=self.running,
        )
        control = problem.platform.task.spec.control
        self.fidelity = control.fidelity
        self.control = control if self.fidelity == RUN else replace(control, repeats=0)
        counted = [trial for trial in self.store.trials() if trial.fidelity == self.fidelity or control.probes]
        self.seconds_before = seconds_used([trial for trial in counted if not trial.source])
        self.started = time.monotonic()
        self.pruned, self.state, self.past = problem.pruned, learn(()), uses.past(problem)
        self.busy = 0
        """Consecutive trials that failed because other programs used their devices."""
        self.search_time = time_of_search(problem, uses.workload) if self.fidelity == RUN else None
        """How long all trials may take; None once an event has it."""
        self._learn()

    @property
    def elapsed(self) -> float:
        """Seconds spent on this run, earlier calls included."""
        return self.seconds_before + time.monotonic() - self.started

    def run(self) -> str:
        """Run the baseline, then candidate after candidate. Returns why the search stopped.

        A search in which a repeat has begun has stopped: resuming does not continue it.
        """
        if stopped := next((each.search_ended for each in self.state.repeats if each.search_ended), None):
            return stopped
        baseline = self.problem.baseline
        while self.busy < MAX_BUSY and not self._settled(baseline):
            self._run(baseline, Role.BASELINE)
        while True:
            self._run_side_by_side()
            reason = self._start_trials()
            if not self.running.trials:
                self.running.limit = 1
                return reason
            self._finish_first()

    def _start_trials(self) -> str:
        """Start trials while devices are free. Returns why no other may start, empty if devices are taken."""
        while self.running.free_group is not None:
            if (reason := self._stop_reason()) is not None:
                return reason
            choice = rank(self.uses.strategy, self._context())
            if choice.row is None:
                return choice.because
            self._start(self.problem.space.candidate(choice.row), Role.SEARCH, choice)
        return ""

    def _run_side_by_side(self) -> None:
        """Let trials run on all groups of devices at once, unless that disturbs them.

        For that, the first candidate that was measured alone runs again beside others.
        """
        first, found = measured_alone(self.state.trials), self.interference
        measuring = any(trial.role is Role.INTERFERENCE for trial in self.running.trials)
        if self.judged or first is None or measuring:
            return
        if found:
            self.judged, self.note = True, found.text
            self.running.limit = len(self.groups) if found.quiet else 1
        elif self.running.trials:  # other programs disturbed it
            self.running.limit = 1
        elif self._stop_reason() is None and self._context().open_rows.size > 1:
            self.running.limit = len(self.groups)
            self._start(first.candidate, Role.INTERFERENCE)

    def _settled(self, baseline: Candidate) -> bool:
        """Return whether the baseline needs no run, or cannot be probed."""
        first = self.state.by_candidate.get(baseline)
        settled = baseline in self.state.settled and not (first and first.source)
        return settled or (self.fidelity != RUN and not self._has_predicted_time(baseline))

    def _stop_reason(self) -> str | None:
        if self.busy >= MAX_BUSY:
            return Message("devices were busy or a host failed in {count} consecutive trials", count=self.busy)
        return stop_reason(self.control, self.state, self.elapsed, len(self._pending))

    @property
    def _pending(self) -> list[Trial]:
        """The candidates that are tried now."""
        return [trial for trial in self.running.trials if trial.role is Role.SEARCH]

    def probe_first(self) -> None:
        """Probe candidates before the first run, `control.probes` in all. Half of the time is left for runs."""
        if self.fidelity != RUN:
            return
        strategy = self.uses.probe_strategy or self.uses.strategy
        while len(probed := self._probed()) < self.control.probes and self._seconds_for_probes() > 0:
            if self.busy >= MAX_BUSY:
                return
            choice = rank(strategy, self._context_for_probes(probed))
            if choice.row is None:
                return
            self._run(self.problem.space.candidate(choice.row), Role.SEARCH, choice, PROBE)

    def repeat(self, search_ended: str) -> None:
        """Run baseline, best and rivals again in rotation, so that noise does not decide."""
        while trial := next_repeat(self.control, self.state):
            if self.busy >= MAX_BUSY or not has_time_to_repeat(self.control, trial, self.elapsed):
                return
            self._run(trial.candidate, Role.REPEAT, search_ended=search_ended)

    def _probed(self) -> frozenset[Candidate]:
        return frozenset(each.candidate for each in self.state.probes if each.settles)

    def _seconds_for_probes(self) -> float:
        limit = self.control.max_time
        return math.inf if limit is None else limit * MAX_SHARE_OF_PROBES - self.elapsed

    def _context(self) -> SearchContext:
        problem, limit = self.problem, self.control.max_time
        context = search_context(
            problem.platform.task,
            self.uses.workload,
            problem.space,
            problem.predictions,
            self.pruned,
            self.state,
            self.past,
            None if limit is None else limit - self.elapsed,
            self._pending,
        )
        return context if self.fidelity == RUN else self._only_with_predicted_time(context)

    def _context_for_probes(self, probed: frozenset[Candidate]) -> SearchContext:
        """Return the context as before any run, without the candidates that were probed."""
        context = self._context()
        rows = [row for candidate in probed if (row := context.space.find(candidate)) is not None]
        open_rows = np.setdiff1d(context.open_rows, np.array(rows, dtype=np.int64))
        interrupted = [trial for trial in self.state.probes if trial.state is TrialState.INTERRUPTED]
        return self._only_with_predicted_time(replace(context, trials=interrupted, open_rows=open_rows))

    def _only_with_predicted_time(self, context: SearchContext) -> SearchContext:
        """Return a context for probes: a probe measures no communication, so it needs the predicted time of that."""
        timed = np.isfinite(context.predictions.step_time_s[context.open_rows])
        return replace(context, open_rows=context.open_rows[timed])

    def _has_predicted_time(self, candidate: Candidate) -> bool:
        return bool(np.isfinite(self.problem.predictions.step_time_s[self.problem.space.find(candidate)]))

    def _run(
        self,
        candidate: Candidate,
        role: Role,
        choice: Choice | None = None,
        fidelity: str | None = None,
        search_ended: str | None = None,
    ) -> None:
        """Run a trial alone."""
        self._start(candidate, role, choice, fidelity, search_ended)
        self._finish_first()

    def _start(
        self,
        candidate: Candidate,
        role: Role,
        choice: Choice | None = None,
        fidelity: str | None = None,
        search_ended: str | None = None,
    ) -> None:
        planned = self._planned(candidate, role, choice, fidelity or self.fidelity, search_ended)
        trial = self.store.begin(planned)
        self._emit("trial_started", trial)
        best = self.state.best if role is Role.SEARCH else None
        # A template is forked for one trial at a time.
        cold = trial.group is not None or (role is Role.REPEAT and candidate == cold_repeat(self.state))
        run = partial(self.attempts.run, best=best, cold=cold, on_wait=partial(self._emit, "trial_waits"))
        self.running.start(trial, run)

    def _finish_first(self) -> None:
        self._finish(self.running.first())

    def interrupt(self, reason: str) -> None:
        """End all trials that run, and store them."""
        for done in self.running.stop(reason):
            self._finish(done)

    def _planned(
        self, candidate: Candidate, role: Role, choice: Choice | None, fidelity: str, search_ended: str | None
    ) -> Trial:
        """Return a trial of a candidate with its prediction, its time limit, and how its steps are shortened."""
        trial = replace(
            predicted_trial(self.problem, self.uses.workload, candidate, role, fidelity),
            began_s=self.elapsed,
            chosen_because=choice.because if choice else None,
            believed=dict(choice.belief) if choice else None,
            search_ended=search_ended,
            group=self.running.free_group if self.running.limit > 1 else None,
        )
        if fidelity == RUN:
            runs = 1 + len(self.state.repeats_of(candidate)) if role is Role.REPEAT else 0
            trial = replace(trial, shortened=shortened_steps(self.problem, self.uses.workload, trial, runs))
        return replace(trial, time_limit=self._time_limit(trial))

    def _time_limit(self, trial: Trial) -> TimeLimit:
        """Return the limit of a trial, or the rest of the run's; probes before the first run have less of it."""
        limit = limit_of(self.problem, self.uses.workload, trial, (*self.state.trials, *self.state.repeats))
        most = self.control.max_time
        if most is None:
            return limit
        left = self._seconds_for_probes() if (trial.fidelity, self.fidelity) == (PROBE, RUN) else most - self.elapsed
        return capped(limit, left, f"auto_tuner.control.max_time = {most:g} s")

    def _finish(self, done: Trial) -> None:
        self.store.finish(done)
        self.busy = self.busy + 1 if done.inconclusive else 0
        self._learn()
        self._emit("trial_finished", done)

    def _learn(self) -> None:
        trials = self.store.trials()
        self.state, self.interference = learn(trials, self.fidelity), interference(trials)
        self.pruned = prune(
            self.problem.space,
            self.problem.predictions,
            self.uses.workload,
            self.problem.rules,
            self.state.trials,
            self.pruned,
            self.state.probes,
        )

    def _emit(self, kind: str, trial: Trial) -> None:
        candidates = len(self.problem.space)
        self.uses.on_event(
            Event(
                kind=kind,
                trial=trial,
                trials_finished=len(self.state.settled),
                trials_planned=min(self.control.max_trials, candidates),
                seconds_left=seconds_left(self.control, self.state, candidates, self.elapsed, self.running.limit),
                best=self.state.best,
                objective=self.problem.platform.task.spec.objective,
                knobs=self.problem.knobs,
                search_time=self.search_time,
                note=self.note,
            )
        )
        self.search_time, self.note = None, ""


def seconds_used(trials: Sequence[Trial]) -> float:
    """Return the seconds that earlier calls used, time between trials included."""
    ends = [trial.began_s + trial.duration_s for trial in trials if trial.began_s is not None]
    return max([*ends, math.fsum(trial.duration_s for trial in trials if trial.group is None)])
