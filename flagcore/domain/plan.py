"""The outcome of a tune: counts, trials, baseline, best and gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flagcore.domain.knowledge import DOES_NOT_FIT, Lessons, Pruned
from flagcore.domain.space import Space
from flagcore.domain.spec import Task
from flagcore.domain.trial import Trial, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Where every combination went.

    combinations = sum(illegal) + merged + candidates, and
    candidates = does_not_fit + sum(pruned) + measured + stopped + failed + untried.
    """

    combinations: int
    illegal: Mapping[str, int]
    merged: int
    candidates: int
    does_not_fit: int
    pruned: Mapping[str, int]
    measured: int
    stopped: int
    failed: int
    untried: int

    @property
    def balanced(self) -> bool:
        """Whether every combination is accounted for."""
        settled = self.does_not_fit + sum(self.pruned.values()) + self.measured + self.stopped + self.failed
        return (
            self.combinations == sum(self.illegal.values()) + self.merged + self.candidates
            and self.candidates == settled + self.untried
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `flag tune` found. `gains` is best over baseline minus one, first runs first, then a figure a repeat."""

    chip: str
    devices: int
    objective: str
    counts: Counts
    trials: tuple[Trial, ...]
    repeats: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    gains: tuple[float, ...]
    stopped_because: str

    @property
    def gain(self) -> float | None:
        """The gain to tell: the least of the rounds, since a disturbed machine can make it look larger than it is."""
        return min(self.gains, default=None)


def summarise(task: Task, space: Space, pruned: Pruned, lessons: Lessons, because: str) -> Plan:
    """Sum up what is known of a task."""
    return Plan(
        chip=task.cluster.chips,
        devices=task.cluster.devices,
        objective=task.spec.objective,
        counts=count(space, pruned, lessons),
        trials=lessons.trials,
        repeats=lessons.repeats,
        baseline=lessons.baseline,
        best=lessons.best,
        gains=gains(lessons),
        stopped_because=because,
    )


def count(space: Space, pruned: Pruned, lessons: Lessons) -> Counts:
    """Balance the books. A candidate that ran counts as what its trial was, whatever a rule said of it later."""
    ran = {row: trial for trial in lessons.trials if (row := space.find(trial.candidate)) is not None}
    states = Counter(trial.state for trial in ran.values())
    rule = pruned.rule.copy()
    rule[list(ran)] = -1
    removed = {name: int((rule == place + 1).sum()) for place, name in enumerate(pruned.rules)}
    return Counts(
        combinations=space.combinations,
        illegal=dict(space.illegal),
        merged=space.merged,
        candidates=len(space),
        does_not_fit=removed.pop(DOES_NOT_FIT, 0),
        pruned={name: number for name, number in removed.items() if number},
        measured=states[TrialState.MEASURED],
        stopped=states[TrialState.STOPPED],
        failed=sum(number for state, number in states.items() if state.failed),
        untried=int((rule == 0).sum()),
    )


def gains(lessons: Lessons) -> tuple[float, ...]:
    """Return how much faster the best is than the baseline in each round, 0.25 for a quarter more tokens a second.

    The first runs are a round, each repeat of both another one; a round of which one half has no measurement
    does not count. Empty without a measured baseline.
    """
    best, baseline = lessons.best, lessons.baseline
    if best is None or baseline is None or baseline.state is not TrialState.MEASURED:
        return ()
    if best.candidate == baseline.candidate:
        return (0.0,)
    rounds = zip(*((trial, *lessons.repeats_of(trial.candidate)) for trial in (best, baseline)), strict=False)
    return tuple(
        fast.measurement.tokens_per_second_per_device / slow.measurement.tokens_per_second_per_device - 1
        for fast, slow in rounds
        if fast.measurement and slow.measurement and fast.state is slow.state is TrialState.MEASURED
    )
