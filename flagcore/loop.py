"""The whole story: discover, build, predict, prune, rank, launch, measure, learn, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from flagcore.contracts import Choice, Event, Launcher, OnEvent, Plugins, Scene, Strategy, TrialStore, Workload
from flagcore.domain.budget import allowance, room_for, seconds_left, spent
from flagcore.domain.candidate import Candidate
from flagcore.domain.experience import Past
from flagcore.domain.noise import next_repeat
from flagcore.domain.plan import Plan, summarise
from flagcore.domain.spec import Spec
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.errors import FlagError, Interrupted, LaunchError, UsageError
from flagcore.problem import Problem, must_fit, pose
from flagcore.stages.discover import present
from flagcore.stages.launch import launch
from flagcore.stages.learn import learn
from flagcore.stages.measure import measure
from flagcore.stages.predict import record
from flagcore.stages.prune import prune
from flagcore.stages.rank import rank, scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop is handed, so that it need not know where any of it comes from."""

    plugins: Plugins
    workload: Workload
    launcher: Launcher
    strategy: Strategy
    open_store: Callable[[Problem], TrialStore]
    on_event: OnEvent
    past: Callable[[Problem], Past] = lambda problem: Past.nothing()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a tune ended: what it found, and the error that ended it before its time, if any."""

    plan: Plan
    problem: Problem
    error: FlagError | None


def tune(spec: Spec, parts: Parts) -> Ending:
    """Find the fastest configuration by running candidates for real. What was measured is kept, however it ends."""
    problem = pose(spec, parts.plugins, parts.workload)
    must_fit(problem)
    present(problem.platform, parts.plugins.devices())
    session = _Session(problem, parts)
    error: FlagError | None = None
    try:
        because = session.search()
        session.repeat()
    except KeyboardInterrupt:
        because, error = "it was interrupted", Interrupted("interrupted")
    except LaunchError as failure:
        because, error = str(failure), failure
    plan = summarise(problem.platform.task, problem.space, session.pruned, session.lessons, because)
    return Ending(plan=plan, problem=problem, error=error)


class _Session:
    """One call of `tune`: the problem, the store, and what is known so far."""

    def __init__(self, problem: Problem, parts: Parts) -> None:
        self.problem, self.parts, self.store = problem, parts, parts.open_store(problem)
        self.control = problem.platform.task.spec.control
        self.spent_before = sum(trial.duration_s for trial in self.store.trials())
        self.started = time.monotonic()
        self.pruned, self.lessons, self.past = problem.pruned, learn(()), parts.past(problem)
        self._learn()

    def search(self) -> str:
        """Try the baseline, then candidate after candidate. Returns why it ended."""
        if self.problem.baseline not in self.lessons.settled:
            self._run(self.problem.baseline, Role.BASELINE)
        while (because := spent(self.control, self.lessons, self.elapsed)) is None:
            choice = rank(self.parts.strategy, self._scene())
            if choice.row is None:
                return choice.because
            self._run(self.problem.space.candidate(choice.row), Role.SEARCH, choice)
        return because

    def repeat(self) -> None:
        """Run baseline, best and its rivals again in rotation, so that what is told is not noise."""
        while (trial := next_repeat(self.control, self.lessons)) and room_for(self.control, trial, self.elapsed):
            self._run(trial.candidate, Role.REPEAT)

    def _scene(self) -> Scene:
        problem, most = self.problem, self.control.max_time
        left = None if most is None else most - self.elapsed
        task, workload = problem.platform.task, self.parts.workload
        known = self.pruned, self.lessons, self.past
        return scene(task, workload, problem.space, problem.predictions, *known, left)

    def _run(self, candidate: Candidate, role: Role, choice: Choice | None = None) -> None:
        """Launch, measure, keep and learn one trial. An interrupt is kept as such, and passes."""
        platform, workload = self.problem.platform, self.parts.workload
        row = self.problem.space.find(candidate)
        assert row is not None, "every candidate that runs is in the space"
        predicted = record(platform.task, self.problem.predictions.row(row))
        if choice:
            predicted |= {"chosen_because": choice.because, "believed": dict(choice.belief)}
        trial = self.store.begin(candidate, role, predicted)
        self._tell("trial_started", trial)
        folder, began = self.store.folder(trial), time.monotonic()
        best = self.lessons.best if role is Role.SEARCH else None
        try:
            limit = allowance(self.control, self.elapsed)
            running = launch(platform, workload, self.parts.launcher, candidate, folder, limit)
            done = measure(running, platform, workload, trial, folder, best)
        except (KeyboardInterrupt, LaunchError) as error:
            reason = str(error) or "interrupted by the user"
            done = replace(trial, state=TrialState.INTERRUPTED, reason=reason, duration_s=time.monotonic() - began)
            self._settle(done)
            raise
        except UsageError as error:  # a plugin that fails to prepare this trial
            done = replace(trial, state=TrialState.FAILED, reason=str(error))
        self._settle(done)

    def _settle(self, done: Trial) -> None:
        self.store.finish(done)
        self._learn()
        self._tell("trial_finished", done)

    def _learn(self) -> None:
        space, predictions = self.problem.space, self.problem.predictions
        self.lessons = learn(self.store.trials())
        rules = self.problem.rules
        self.pruned = prune(space, predictions, self.parts.workload, rules, self.lessons.trials, self.pruned)

    @property
    def elapsed(self) -> float:
        """Seconds spent on this run, earlier starts included."""
        return self.spent_before + time.monotonic() - self.started

    def _tell(self, kind: str, trial: Trial) -> None:
        event = Event(
            kind=kind,
            trial=trial,
            trials_finished=len(self.lessons.settled),
            trials_planned=min(self.control.max_trials, len(self.problem.space)),
            seconds_left=seconds_left(self.control, self.lessons, len(self.problem.space), self.elapsed),
            best=self.lessons.best,
        )
        self.parts.on_event(event)
