"""The outcome of a tune: counts, trials, baseline, best and gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flagcore.domain.candidate import Candidate
from flagcore.domain.knowledge import DOES_NOT_FIT, Lessons, Pruned
from flagcore.domain.space import Space
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


def count(space: Space, pruned: Pruned, lessons: Lessons) -> Counts:
    """Balance the books. A candidate that ran counts as what its trial was, whatever a rule said of it later."""
    removed = Counter(dict.fromkeys(pruned.rules, 0))
    for code in range(1, len(pruned.rules) + 1):
        removed[pruned.rules[code - 1]] = int((pruned.rule == code).sum())
    states = Counter(trial.state for trial in lessons.trials)
    for trial in lessons.trials:
        row = space.find(trial.candidate)
        if row is not None and pruned.rule[row]:
            removed[pruned.rules[int(pruned.rule[row]) - 1]] -= 1
    failed = sum(number for state, number in states.items() if state.failed)
    does_not_fit = removed.pop(DOES_NOT_FIT, 0)
    settled = states[TrialState.MEASURED] + states[TrialState.STOPPED] + failed
    return Counts(
        combinations=space.combinations,
        illegal=dict(space.illegal),
        merged=space.merged,
        candidates=len(space),
        does_not_fit=does_not_fit,
        pruned={name: number for name, number in removed.items() if number},
        measured=states[TrialState.MEASURED],
        stopped=states[TrialState.STOPPED],
        failed=failed,
        untried=len(space) - does_not_fit - sum(removed.values()) - settled,
    )


def gains(lessons: Lessons) -> tuple[float, ...]:
    """Return how much faster the best is than the baseline in each round, 0.25 for a quarter more tokens a second.

    The first runs are a round, each repeat of both another one. Empty without a measured baseline.
    """
    best, baseline = lessons.best, lessons.baseline
    if not best or not baseline or not baseline.measurement:
        return ()
    if best.candidate == baseline.candidate:
        return (0.0,)
    fast, slow = (_speeds((trial, *lessons.repeats), trial.candidate) for trial in (best, baseline))
    return tuple(quick / steady - 1 for quick, steady in zip(fast, slow, strict=False))


def _speeds(trials: Sequence[Trial], candidate: Candidate) -> list[float]:
    return [
        trial.measurement.tokens_per_second_per_device
        for trial in trials
        if trial.candidate == candidate and trial.measurement and trial.state is TrialState.MEASURED
    ]
