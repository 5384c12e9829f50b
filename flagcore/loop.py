"""The whole story: discover, build, predict, prune, rank, launch, measure, learn, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from flagcore.contracts import Event, Launcher, OnEvent, Plugins, Strategy, TrialStore, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.knowledge import Lessons
from flagcore.domain.plan import Plan, count, gains
from flagcore.domain.spec import Spec
from flagcore.domain.trial import Role, Trial, TrialState
from flagcore.errors import LaunchError, UsageError
from flagcore.problem import Problem, pose
from flagcore.stages.discover import present
from flagcore.stages.launch import launch
from flagcore.stages.learn import learn
from flagcore.stages.measure import measure
from flagcore.stages.predict import record
from flagcore.stages.prune import prune
from flagcore.stages.rank import rank

INTERRUPTED = "interrupted"
HOPELESS_START = 5
BROKEN = (TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT)
"""After this many trials that all ended like this, something is wrong with the task, not with the candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop is handed, so that it need not know where any of it comes from."""

    plugins: Plugins
    workload: Workload
    launcher: Launcher
    strategy: Strategy
    open_store: Callable[[Problem], TrialStore]
    on_event: OnEvent


def tune(spec: Spec, parts: Parts) -> tuple[Plan, Problem]:
    """Find the fastest configuration by running candidates for real. Ctrl-C ends it; what was measured is kept."""
    problem = pose(spec, parts.plugins, parts.workload)
    present(problem.platform, parts.plugins.devices())
    session = _Session(problem, parts)
    try:
        because = session.search()
        session.repeat()
    except KeyboardInterrupt:
        because = INTERRUPTED
    return session.plan(because), problem


class _Session:
    """One call of `tune`: the problem, the store, and what is known so far."""

    def __init__(self, problem: Problem, parts: Parts) -> None:
        self.problem, self.parts, self.store = problem, parts, parts.open_store(problem)
        self.control = problem.platform.task.spec.control
        self.pruned, self.started = problem.pruned, time.monotonic()
        self.lessons: Lessons = learn(())
        self.spent_before = sum(trial.duration_s for trial in self.store.trials())
        self._learn()

    def search(self) -> str:
        """Try the baseline, then candidate after candidate. Returns why it ended."""
        if self.problem.baseline not in self.lessons.settled:
            self._run(self.problem.baseline, Role.BASELINE)
        while (because := self._spent()) is None:
            row = rank(self.parts.strategy, self.problem.space, self.problem.predictions, self.pruned, self.lessons)
            if row is None:
                return "every candidate is settled"
            self._run(self.problem.space.candidate(row), Role.SEARCH)
        return because

    def repeat(self) -> None:
        """Run baseline and best again in alternation, so that the gain told is not noise."""
        best, baseline = self.lessons.best, self.lessons.baseline
        if not best or not baseline or not baseline.measurement or best.candidate == baseline.candidate:
            return
        for round_ in range(self.control.repeats):
            for trial in (baseline, best):
                done = sum(repeat.candidate == trial.candidate for repeat in self.lessons.repeats)
                if done <= round_:
                    self._run(trial.candidate, Role.REPEAT)

    def plan(self, because: str) -> Plan:
        """Sum up what is known."""
        task, lessons = self.problem.platform.task, self.lessons
        return Plan(
            chip=task.cluster.groups[0].chip.name,
            devices=task.cluster.devices,
            objective=task.spec.objective,
            counts=count(self.problem.space, self.pruned, lessons),
            trials=lessons.trials,
            repeats=lessons.repeats,
            baseline=lessons.baseline,
            best=lessons.best,
            gains=gains(lessons),
            stopped_because=because,
        )

    def _run(self, candidate: Candidate, role: Role) -> None:
        """Launch, measure, keep and learn one trial. An interrupt is kept as such, and passes."""
        platform, workload = self.problem.platform, self.parts.workload
        trial = self.store.begin(candidate, role, self._predicted(candidate))
        self._tell("trial_started", trial)
        folder, began = self.store.folder(trial), time.monotonic()
        best = self.lessons.best if role is Role.SEARCH else None
        try:
            running = launch(platform, workload, self.parts.launcher, candidate, folder, self.control.max_time_per_task)
            done = measure(running, platform, workload, trial, folder, best)
        except KeyboardInterrupt:
            done = replace(trial, state=TrialState.INTERRUPTED, reason="interrupted by the user")
            self.store.finish(replace(done, duration_s=time.monotonic() - began))
            self._learn()
            raise
        except LaunchError as error:
            self.store.finish(replace(trial, state=TrialState.FAILED, reason=str(error)))
            raise
        except UsageError as error:  # a plugin that fails to prepare this trial
            done = replace(trial, state=TrialState.FAILED, reason=str(error))
        self.store.finish(done)
        self._learn()
        self._tell("trial_finished", done)

    def _learn(self) -> None:
        trials = self.store.trials()
        self.lessons = learn(trials)
        self.pruned = prune(
            self.problem.space, self.problem.predictions, self.parts.workload, (), self.lessons.trials, self.pruned
        )

    def _spent(self) -> str | None:
        """Return why no further trial may start, or None. Room is left for the repeats."""
        control, trials = self.control, self.lessons.trials
        if len(trials) >= HOPELESS_START and all(trial.state in BROKEN for trial in trials):
            return f"the first {len(trials)} trials all failed"
        if len(trials) >= control.max_trials:
            return f"max_trials = {control.max_trials} reached"
        if control.max_time is None or not trials:
            return None
        longest = max(trial.duration_s for trial in trials)
        reserve = 2 * control.repeats * longest if self.lessons.best else 0.0
        left = control.max_time - self.elapsed - reserve
        return f"max_time = {control.max_time:g} s is spent" if left < longest else None

    @property
    def elapsed(self) -> float:
        """Seconds spent on this run, earlier starts included."""
        return self.spent_before + time.monotonic() - self.started

    def _predicted(self, candidate: Candidate) -> dict[str, object]:
        row = self.problem.space.find(candidate)
        assert row is not None, "every candidate that runs is in the space"
        return record(self.problem.platform.task, self.problem.predictions.row(row))

    def _tell(self, kind: str, trial: Trial) -> None:
        done, planned = len(self.lessons.trials), self.control.max_trials
        each = sum(known.duration_s for known in self.lessons.trials) / max(done, 1)
        left = each * (min(planned, len(self.problem.space)) - done + 2 * self.control.repeats) if done else None
        if left is not None and self.control.max_time is not None:
            left = min(left, max(0.0, self.control.max_time - self.elapsed))
        self.parts.on_event(
            Event(
                kind=kind,
                trial=trial,
                trials_finished=done,
                trials_planned=planned,
                seconds_left=left,
                best=self.lessons.best,
            )
        )
