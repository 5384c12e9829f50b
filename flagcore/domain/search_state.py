"""The state of a search: removed candidates and trials so far, the noise of measurements, repeats, and the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from flagcore.domain.candidate import Candidate
from flagcore.domain.space import BoolArray, IntArray
from flagcore.domain.spec import Control
from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import Message

DOES_NOT_FIT = "does_not_fit"
"""The rule that removes candidates with too much predicted memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Which rule removed each row. `rule` is 0 for an open row, else a place in `rules` plus one; `trial` is the
    number of the trial behind a learned rule, -1 for none. `too_much` marks the rows that do not fit by
    corrected predictions, `seen` are the trials already applied."""

    rule: NDArray[np.int16]
    trial: IntArray
    too_much: BoolArray
    rules: tuple[str, ...] = ()
    broken_rules: tuple[str, ...] = ()
    seen: frozenset[int] = field(default_factory=frozenset)

    @property
    def open_rows(self) -> IntArray:
        """Positions of the rows that no rule has removed."""
        return np.flatnonzero(self.rule == 0)

    def reason(self, row: int) -> str | None:
        """Return a description of what removed `row`, or None."""
        code = int(self.rule[row])
        if not code:
            return None
        behind = int(self.trial[row])
        return self.rules[code - 1] + (f" (trial {behind})" if behind >= 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The trials so far: the last one of each candidate, the baseline, and the best.

    `best` is the first trial of the candidate with the best median among those that keep the limits, `fastest` that of
    all measured ones. `probes` are trials of a lower fidelity, which settle no candidate.
    """

    by_candidate: dict[Candidate, Trial]
    repeats: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    fastest: Trial | None = None
    probes: tuple[Trial, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """One trial a candidate, in the order in which they ran."""
        return tuple(sorted(self.by_candidate.values(), key=lambda trial: trial.number))

    def repeats_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the repeats of a candidate that ended undisturbed, in order."""
        return tuple(trial for trial in self.repeats if trial.settles and trial.candidate == candidate)

    def runs_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the measured runs of a candidate, repeats included; imported ones, and those that are not final, only
        without others."""
        first = self.by_candidate.get(candidate)
        runs = (*((first,) if first else ()), *self.repeats_of(candidate))
        measured = tuple(trial for trial in runs if trial.state is TrialState.MEASURED and trial.measurement)
        own = tuple(trial for trial in measured if not trial.source) or measured
        return tuple(trial for trial in own if trial.is_final) or own

    def shown(self, trial: Trial | None) -> Trial | None:
        """Return the trial whose figures a report shows for a candidate: `trial`, or a run that was scaled less."""
        if trial is None or (trial.is_final and not trial.shortened):
            return trial
        runs = self.runs_of(trial.candidate) or (trial,)
        return max(runs, key=lambda run: run.shortened.nodes if run.shortened else math.inf)

    def speed_of(self, candidate: Candidate) -> float:
        """Return the median speed of a candidate's runs, 0 without any."""
        return median([speed(trial) for trial in self.runs_of(candidate)] or [0.0])

    def keeps_limits(self, candidate: Candidate) -> bool:
        """Return whether more than half of a candidate's measured runs kept every limit."""
        runs = self.runs_of(candidate)
        return 2 * sum(not trial.measurement.broken for trial in runs if trial.measurement) > len(runs)

    @property
    def settled(self) -> frozenset[Candidate]:
        """Candidates that need no further trial; one that was interrupted or disturbed may be tried again."""
        return frozenset(candidate for candidate, trial in self.by_candidate.items() if trial.settles)


def speed(trial: Trial) -> float:
    """Return the steps per second of one run, 0 for one without a measurement."""
    return 1.0 / trial.measurement.step_time_s if trial.measurement and trial.measurement.step_time_s > 0 else 0.0


MIN_NOISE = 0.02
"""The least relative difference between two runs of one configuration, however even their steps are."""

MAX_RIVALS = 2
"""How many rivals of the best are run again, the fastest ones."""

EXTRA_ROUNDS = 2
"""Rounds beyond `control.repeats` while a rival does not differ significantly from the best."""


def noise(runs: Sequence[Trial]) -> float:
    """Return the relative noise of a candidate, from the spread of steps and of runs, and the scaling of steps."""
    measured = [trial.measurement for trial in runs if trial.measurement]
    if not measured:
        return MIN_NOISE
    scaling = (trial.interval for trial in runs)
    within = median(one.spread_s / one.step_time_s if one.step_time_s > 0 else 0.0 for one in measured)
    speeds = [speed(trial) for trial in runs]
    middle = median(speeds)
    between = (max(speeds) - min(speeds)) / 2 / middle if middle > 0 else 0.0
    return max(MIN_NOISE, within, between, *scaling)


def significant(longer: float, one: Sequence[Trial], other: Sequence[Trial]) -> bool:
    """Return whether two candidates differ by more than their runs do.

    `longer` is how much longer the slower one takes, as a share: 2.0 for three times as long. It must reach the larger
    noise of both over the root of their fewer runs. Both are shares of a time: a disturbed run takes longer, and may
    take several times as long; a share of a speed would never reach a noise beyond 100%.
    """
    return longer >= max(noise(one), noise(other)) / math.sqrt(min(len(one), len(other)))


def rivals(search_state: SearchState) -> tuple[Trial, ...]:
    """Return the measured candidates that do not differ significantly from the best; the fastest first."""
    best = search_state.best
    if best is None:
        return ()
    runs, top = search_state.runs_of(best.candidate), search_state.speed_of(best.candidate)
    near = []
    for trial in search_state.trials:
        if trial.candidate == best.candidate or not search_state.keeps_limits(trial.candidate):
            continue
        own, own_speed = search_state.runs_of(trial.candidate), search_state.speed_of(trial.candidate)
        if own_speed and not significant(top / own_speed - 1.0, runs, own):
            near.append(trial)
    return tuple(sorted(near, key=lambda trial: -search_state.speed_of(trial.candidate)))


def finalists(search_state: SearchState) -> tuple[Trial, ...]:
    """Return baseline, best and the fastest rivals, each once, in this order; empty without a best."""
    if search_state.best is None:
        return ()
    known = search_state.baseline
    baseline = (known,) if known and known.state is TrialState.MEASURED else ()
    chosen = {trial.candidate: trial for trial in (*baseline, search_state.best, *rivals(search_state)[:MAX_RIVALS])}
    return tuple(chosen.values())


def least_repeats(control: Control, search_state: SearchState) -> dict[Candidate, int]:
    """Return how often each finalist runs again at least: `control.repeats` times if there are several.

    A finalist whose steps were shortened, or that ran beside others, runs whole and alone at least once. All run on
    each number of `control.trial_nodes`.
    """
    several = finalists(search_state)
    rounds = max(control.repeats if len(several) > 1 else 0, len(control.trial_nodes) - 1)
    return {trial.candidate: rounds if trial.is_final else max(rounds, 1) for trial in several}


def next_repeat(control: Control, search_state: SearchState) -> Trial | None:
    """Return the trial to run again, None if repeats are done.

    The finalists run again in rotation, `least_repeats` times. Then there are more rounds, `EXTRA_ROUNDS` at most,
    while a rival does not differ significantly. Best and rivals may change, so all repeats together are limited, too.
    """
    several, least = finalists(search_state), least_repeats(control, search_state)
    done = {trial.candidate: len(search_state.repeats_of(trial.candidate)) for trial in several}
    most = max(control.repeats, len(control.trial_nodes) - 1) + EXTRA_ROUNDS
    if sum(trial.settles for trial in search_state.repeats) >= most * (2 + MAX_RIVALS):
        return None
    waiting = [trial for trial in several if done[trial.candidate] < least[trial.candidate]]
    if not waiting and control.repeats and rivals(search_state):
        waiting = [trial for trial in several if done[trial.candidate] < most]
    return min(waiting, key=lambda trial: done[trial.candidate], default=None)


def drift(search_state: SearchState) -> float | None:
    """Return the relative speedup from the first to the last run of the baseline; None if it ran once."""
    runs = search_state.runs_of(search_state.baseline.candidate) if search_state.baseline else ()
    return speed(runs[-1]) / speed(runs[0]) - 1.0 if len(runs) > 1 else None


def drifted(search_state: SearchState) -> bool:
    """Return whether the drift of the baseline is more than the noise of its runs."""
    change = drift(search_state)
    if change is None or search_state.baseline is None:
        return False
    runs = search_state.runs_of(search_state.baseline.candidate)
    return abs(change) > max(noise([run]) for run in (runs[0], runs[-1]))


def cold_repeat(search_state: SearchState) -> Candidate | None:
    """Return the candidate whose next repeat starts cold, None for none: one repeat of a run, not of the baseline.

    The first and the last run of the baseline start alike, so that they show the drift of the machine.
    """
    if any(trial.measurement and not trial.warm for trial in search_state.repeats):
        return None
    others = (trial.candidate for trial in finalists(search_state) if trial is not search_state.baseline)
    return next(others, None)


def cold_start(search_state: SearchState) -> tuple[float, float] | None:
    """Return the relative speedup of a finalist from its warm to its cold runs beyond the drift, and the noise of that.

    None without both.
    """
    known = search_state.baseline
    of_baseline = search_state.runs_of(known.candidate) if known else ()
    for trial in search_state.trials:
        runs = search_state.runs_of(trial.candidate) if trial is not known else ()
        warm, cold = ([each for each in runs if each.warm is kind] for kind in (True, False))
        if warm and cold:
            change = median(map(speed, cold)) / median(map(speed, warm))
            uncertain = math.hypot(*map(noise, (warm, cold, of_baseline)))
            return change / (1.0 + (drift(search_state) or 0.0)) - 1.0, uncertain
    return None


MAX_FAILED_AT_START = 5
"""If the first trials, so many, all ended in FAILED_STATES, the task is wrong and not the candidates."""
FAILED_STATES = (TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT)


def stop_reason(control: Control, search_state: SearchState, elapsed: float, pending: int = 0) -> str | None:
    """Return why the search stops, or None. Time is reserved for repeats and for one more trial.

    `pending` trials run now.
    """
    trials = _completed_trials(search_state)
    if len(trials) >= MAX_FAILED_AT_START and all(trial.state in FAILED_STATES for trial in trials):
        return Message("the first {count} trials all failed", count=len(trials))
    if len(trials) + pending >= control.max_trials:
        return Message("max_trials = {count} reached", count=control.max_trials)
    if control.max_time is None:
        return None
    measured = [trial.duration_s for trial in trials if trial.state is TrialState.MEASURED]
    needed = max(measured, default=0.0) + repeats_seconds(control, search_state)
    left = control.max_time - elapsed
    return Message("max_time = {seconds:g} s reached", seconds=control.max_time) if left <= needed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTime:
    """How many trials and repeats a search has at most, and the seconds that they may take by their limits.

    `steps_s` are the predicted seconds of their steps alone, None if unknown.
    """

    trials: int
    repeats: int
    steps_s: float | None
    at_most_s: float


def seconds_left(
    control: Control, search_state: SearchState, candidates: int, elapsed: float, at_once: int = 1
) -> float | None:
    """Return an estimate of the rest of the run at the pace so far, with all repeats that may come.

    `at_once` trials run at once. None before the first trial.
    """
    trials = _completed_trials(search_state)
    if not trials:
        return None
    pace = sum(trial.duration_s for trial in trials) / len(trials) / at_once
    left = pace * max(0, min(control.max_trials, candidates) - len(trials))
    left += repeats_seconds(control, search_state, at_most=True)
    return left if control.max_time is None else min(left, max(0.0, control.max_time - elapsed))


def repeats_seconds(control: Control, search_state: SearchState, *, at_most: bool = False) -> float:
    """Return the least, or the most, seconds that the remaining repeats take."""
    extra = EXTRA_ROUNDS if at_most and control.repeats and rivals(search_state) else 0
    least = least_repeats(control, search_state)
    left = (
        (trial, least[trial.candidate] + extra - len(search_state.repeats_of(trial.candidate)))
        for trial in finalists(search_state)
    )
    return sum((max(0, runs) * whole_seconds(control, trial) for trial, runs in left), 0.0)


def has_time_to_repeat(control: Control, trial: Trial, elapsed: float) -> bool:
    """Return whether there is time to run `trial` again."""
    return control.max_time is None or elapsed + whole_seconds(control, trial) <= control.max_time


def whole_seconds(control: Control, trial: Trial) -> float:
    """Return how long a measured trial takes with whole steps."""
    measured = trial.measurement
    if measured is None or measured.scaled_from is None or (trial.shortened and trial.shortened.nodes):
        return trial.duration_s
    return trial.duration_s + control.train_iters * (measured.step_time_s - measured.scaled_from)


def _completed_trials(search_state: SearchState) -> list[Trial]:
    return [trial for trial in search_state.trials if trial.settles and not trial.source]
