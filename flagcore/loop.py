"""The whole story: discover, build, predict, prune, rank, launch, measure, learn, until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.contracts import Choice, Event, Launcher, OnEvent, Plugins, SearchContext, Strategy, TrialStore, Workload
from flagcore.domain.budget import allowance, room_for, seconds_left, spent
from flagcore.domain.candidate import Candidate
from flagcore.domain.experience import Past
from flagcore.domain.noise import next_repeat
from flagcore.domain.plan import Plan, summarise
from flagcore.domain.spec import Spec
from flagcore.domain.trial import ESTIMATE, PROBE, RUN, Role, Trial, TrialState
from flagcore.dry_run import dry_run, require_predicted_time
from flagcore.errors import FlagError, Interrupted, LaunchError, UsageError
from flagcore.problem import Problem, build_problem, require_candidate, require_launchable
from flagcore.stages.combine import combine
from flagcore.stages.discover import present, side_by_side
from flagcore.stages.launch import launch
from flagcore.stages.learn import learn
from flagcore.stages.measure import measure
from flagcore.stages.predict import record
from flagcore.stages.probe import probe
from flagcore.stages.probe_result import judge
from flagcore.stages.prune import prune
from flagcore.stages.rank import rank, search_context

PROBES_SHARE = 0.5
"""Of `control.max_time` as much is for the probes before the first run, at the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop is handed, so that it need not know where any of it comes from.

    `prober` says what is probed before the first run; without one, `strategy` does.
    """

    plugins: Plugins
    workload: Workload
    launcher: Launcher
    strategy: Strategy
    open_store: Callable[[Problem], TrialStore]
    on_event: OnEvent
    past: Callable[[Problem], Past] = lambda problem: Past.nothing()
    prober: Strategy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a tune ended: what it found, and the error that ended it before its time, if any."""

    plan: Plan
    problem: Problem
    error: FlagError | None


def tune(spec: Spec, parts: Parts) -> Ending:
    """Find the fastest configuration by running candidates for real, by probing them, or as predicted.

    What was measured is kept, however it ends.
    """
    fidelity = spec.control.fidelity
    problem = build_problem(spec, parts.plugins, parts.workload)
    require_candidate(problem)
    if fidelity != RUN:
        require_predicted_time(problem)
    if fidelity == ESTIMATE:
        parts.open_store(problem)
        return Ending(plan=dry_run(problem), problem=problem, error=None)
    require_launchable(problem)
    here = parts.plugins.devices()
    present(problem.platform, here, needed=1 if fidelity == PROBE else None)
    session = _Session(problem, parts, devices=side_by_side(problem.platform, here))
    error: FlagError | None = None
    try:
        session.probe_first()
        because = session.search()
        session.repeat(because)
    except KeyboardInterrupt:
        because, error = "it was interrupted", Interrupted("interrupted")
    except LaunchError as failure:
        because, error = str(failure), failure
    plan = summarise(problem.platform.task, problem.space, session.pruned, session.search_state, because)
    return Ending(plan=plan, problem=problem, error=error)


class _Session:
    """One call of `tune`: the problem, the store, and what is known so far. `devices` play ranks side by side."""

    def __init__(self, problem: Problem, parts: Parts, devices: int) -> None:
        self.devices = devices
        self.problem, self.parts, self.store = problem, parts, parts.open_store(problem)
        control = problem.platform.task.spec.control
        self.fidelity = control.fidelity
        self.control = control if self.fidelity == RUN else replace(control, repeats=0)
        counts = [trial for trial in self.store.trials() if trial.fidelity == self.fidelity or control.probes]
        self.spent_before = _spent_by([trial for trial in counts if not trial.source])
        self.started = time.monotonic()
        self.pruned, self.search_state, self.past = problem.pruned, learn(()), parts.past(problem)
        self._learn()

    def search(self) -> str:
        """Try the baseline, then candidate after candidate. Returns why it ended.

        It stays ended once a repeat has begun, also where an earlier start of the run came so far: what the repeats
        taught, or left of the time, is no reason to go on.
        """
        if ended := next((why for each in self.search_state.repeats if (why := each.search_ended)), None):
            return ended
        first = self.search_state.by_candidate.get(self.problem.baseline)
        settled = self.problem.baseline in self.search_state.settled and not (first and first.source)
        if not settled and self._can_be_told(self.problem.baseline):
            self._run(self.problem.baseline, Role.BASELINE)
        while (because := spent(self.control, self.search_state, self.elapsed)) is None:
            choice = rank(self.parts.strategy, self._scene())
            if choice.row is None:
                return choice.because
            self._run(self.problem.space.candidate(choice.row), Role.SEARCH, choice)
        return because

    def probe_first(self) -> None:
        """Probe the candidates most worth it, whatever the order of runs, until there are as many as are wanted.

        Half of the time is left for runs at the least. Where probes are the search itself, none comes first.
        """
        if self.fidelity != RUN:
            return
        while len(done := self._probed()) < self.control.probes and self._seconds_for_probes() > 0:
            choice = rank(self.parts.prober or self.parts.strategy, self._scene_of_probes(done))
            if choice.row is None:
                return
            self._run(self.problem.space.candidate(choice.row), Role.SEARCH, choice, PROBE)

    def repeat(self, because: str) -> None:
        """Run baseline, best and its rivals again in rotation, so that what is told is not noise.

        Each keeps why the search had ended.
        """
        while (trial := next_repeat(self.control, self.search_state)) and room_for(self.control, trial, self.elapsed):
            self._run(trial.candidate, Role.REPEAT, search_ended=because)

    def _probed(self) -> frozenset[Candidate]:
        ended = [trial for trial in self.search_state.probes if trial.state is not TrialState.INTERRUPTED]
        return frozenset(trial.candidate for trial in ended)

    def _seconds_for_probes(self) -> float:
        most = self.control.max_time
        return math.inf if most is None else most * PROBES_SHARE - self.elapsed

    def _scene_of_probes(self, done: frozenset[Candidate]) -> SearchContext:
        """Return the context as it would be before any run, without the candidates that are probed."""
        seen = self._scene()
        rows = [row for candidate in done if (row := seen.space.find(candidate)) is not None]
        left = np.setdiff1d(seen.open_rows, np.array(rows, dtype=np.int64))
        left = left[np.isfinite(seen.predictions.step_time_s[left])]
        cut = [trial for trial in self.search_state.probes if trial.state is TrialState.INTERRUPTED]
        return replace(seen, trials=cut, open_rows=left)

    def _can_be_told(self, candidate: Candidate) -> bool:
        """Return whether a trial tells the time of a candidate: a probe does not without that of communication."""
        row = self.problem.space.find(candidate)
        return self.fidelity == RUN or bool(np.isfinite(self.problem.predictions.step_time_s[row]))

    def _scene(self) -> SearchContext:
        problem, most = self.problem, self.control.max_time
        left = None if most is None else most - self.elapsed
        task, workload = problem.platform.task, self.parts.workload
        known = self.pruned, self.search_state, self.past
        seen = search_context(task, workload, problem.space, problem.predictions, *known, left)
        if self.fidelity == RUN:
            return seen
        timed = np.isfinite(problem.predictions.step_time_s[seen.open_rows])
        return replace(seen, open_rows=seen.open_rows[timed])

    def _run(
        self,
        candidate: Candidate,
        role: Role,
        choice: Choice | None = None,
        fidelity: str | None = None,
        search_ended: str | None = None,
    ) -> None:
        """Run or probe, keep and learn one trial. An interrupt is kept as such, and passes."""
        platform, fidelity = self.problem.platform, fidelity or self.fidelity
        row = self.problem.space.find(candidate)
        assert row is not None, "every candidate that runs is in the space"
        planned = Trial(
            number=0,
            candidate=candidate,
            role=role,
            state=TrialState.RUNNING,
            predicted=record(platform.task, self.problem.predictions.row(row)),
            fidelity=fidelity,
            began_s=self.elapsed,
            chosen_because=choice.because if choice else None,
            believed=dict(choice.belief) if choice else None,
            search_ended=search_ended,
        )
        trial = self.store.begin(planned)
        self._tell("trial_started", trial)
        began = time.monotonic()
        try:
            done = self._measured(trial) if fidelity == RUN else self._from_probe(trial, row)
        except (KeyboardInterrupt, LaunchError) as error:
            reason = str(error) or "interrupted by the user"
            done = replace(trial, state=TrialState.INTERRUPTED, reason=reason, duration_s=time.monotonic() - began)
            self._settle(done)
            raise
        except UsageError as error:  # a plugin that fails to prepare this trial
            done = replace(trial, state=TrialState.FAILED, reason=str(error))
        self._settle(done)

    def _measured(self, trial: Trial) -> Trial:
        """Launch and measure."""
        platform, workload, folder = self.problem.platform, self.parts.workload, self.store.folder(trial)
        best = self.search_state.best if trial.role is Role.SEARCH else None
        limit = allowance(self.control, self.elapsed)
        running = launch(platform, workload, self.parts.launcher, trial.candidate, folder, limit)
        return measure(running, platform, workload, trial, folder, best)

    def _from_probe(self, trial: Trial, row: int) -> Trial:
        """Probe rank by rank, and go on where an earlier probe of the same candidate was interrupted."""
        platform, workload, folder = self.problem.platform, self.parts.workload, self.store.folder(trial)
        limit = allowance(self.control, self.elapsed)
        if self.fidelity == RUN:
            limit = max(1.0, min(limit, self._seconds_for_probes()))
        earlier = [
            self.store.folder(each)
            for each in self.store.trials()
            if (each.candidate, each.fidelity) == (trial.candidate, PROBE) and each.state is TrialState.INTERRUPTED
        ]
        launcher, candidate = self.parts.launcher, trial.candidate
        several = platform, workload, launcher, candidate, folder, limit
        found = probe(*several, earlier=earlier, to_the_end=False, devices=self.devices)
        combined = combine(self.problem.predictions.row(row), found, platform.costs.memory)
        return judge(platform.task, trial, found, combined)

    def _settle(self, done: Trial) -> None:
        self.store.finish(done)
        self._learn()
        self._tell("trial_finished", done)

    def _learn(self) -> None:
        space, predictions = self.problem.space, self.problem.predictions
        self.search_state = learn(self.store.trials(), self.fidelity)
        known = self.problem.rules, self.search_state.trials, self.pruned, self.search_state.probes
        self.pruned = prune(space, predictions, self.parts.workload, *known)

    @property
    def elapsed(self) -> float:
        """Seconds spent on this run, earlier starts included."""
        return self.spent_before + time.monotonic() - self.started

    def _tell(self, kind: str, trial: Trial) -> None:
        event = Event(
            kind=kind,
            trial=trial,
            trials_finished=len(self.search_state.settled),
            trials_planned=min(self.control.max_trials, len(self.problem.space)),
            seconds_left=seconds_left(self.control, self.search_state, len(self.problem.space), self.elapsed),
            best=self.search_state.best,
            objective=self.problem.platform.task.spec.objective,
        )
        self.parts.on_event(event)


def _spent_by(trials: Sequence[Trial]) -> float:
    """Return the seconds of the run that earlier starts took, with what lay between their trials."""
    ends = [trial.began_s + trial.duration_s for trial in trials if trial.began_s is not None]
    return max([*ends, math.fsum(trial.duration_s for trial in trials)])
