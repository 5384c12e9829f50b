"""The state of a search: pruned candidates, trials, the noise of measurements, repeats, and the budget."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from flagcore.domain.chip import share_of_others
from flagcore.domain.space import BoolArray, Candidate, IntArray
from flagcore.domain.spec import Control
from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import N_, Message

DOES_NOT_FIT = "does_not_fit"
NEEDS_AS_MUCH_MEMORY = "needs_as_much_memory_as_one_that_ran_out"
DOES_AS_MUCH_WORK = "does_the_work_of_a_measured_one_and_more"
LEARNED_MESSAGES = {
    DOES_NOT_FIT: "the candidate's predicted memory is more than a device has",
    NEEDS_AS_MUCH_MEMORY: "a trial ran out of memory, and no knob of this candidate needs less",
    DOES_AS_MUCH_WORK: "a trial was measured, and this candidate does at least as much work",
}
"""The messages of the pruning rules that are derived from predictions and from trials, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The candidates that rules have removed from the space. A row is the position of a candidate in the space.

    `rule`: for each row, the rule that removed it: 0 for a row that was not removed, otherwise the index in `rules`
    plus one.
    `trial`: for each row, the number of the trial from which that rule was learned. -1 for other rules.
    `exceeds_memory`: for each row, whether it does not fit according to corrected predictions.
    `applied_trials`: the numbers of the trials from which rules have already been learned.
    """

    rule: NDArray[np.int16]
    trial: IntArray
    exceeds_memory: BoolArray
    rules: tuple[str, ...] = ()
    applied_trials: frozenset[int] = field(default_factory=frozenset)

    @property
    def open_rows(self) -> IntArray:
        """The rows that no rule has removed."""
        return np.flatnonzero(self.rule == 0)

    def reason(self, row: int) -> str | None:
        """Return the name of the rule that removed `row`, or None if the row was not removed.

        For a learned rule, the number of the trial is added to the name.
        """
        rule = int(self.rule[row])
        if not rule:
            return None
        trial = int(self.trial[row])
        return self.rules[rule - 1] + (f" (trial {trial})" if trial >= 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """The trials of a search so far.

    `by_candidate`: the trial that counts as the result of each candidate; see `flagcore.tuner.stages.rank.learn`.
    `best`: the trial of the candidate with the highest median speed among those that meet the limits.
    `fastest`: the trial of the candidate with the highest median speed, whether it meets the limits or not.
    `probes`: trials of a lower fidelity.
    """

    by_candidate: dict[Candidate, Trial] = field(default_factory=dict)
    repeats: tuple[Trial, ...] = ()
    baseline: Trial | None = None
    best: Trial | None = None
    fastest: Trial | None = None
    probes: tuple[Trial, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """One trial per candidate, in the order in which they ran."""
        return tuple(sorted(self.by_candidate.values(), key=lambda trial: trial.number))

    def repeats_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the conclusive repeats of a candidate, in order."""
        return tuple(trial for trial in self.repeats if trial.is_conclusive and trial.candidate == candidate)

    def runs_of(self, candidate: Candidate) -> tuple[Trial, ...]:
        """Return the measured runs of a candidate, including repeats.

        Imported runs are returned only if there are no other runs. Runs that are not final (see `Trial.is_final`), and
        runs on cores that other programs used, are returned only if there are no others.
        """
        first = self.by_candidate.get(candidate)
        runs = (*((first,) if first else ()), *self.repeats_of(candidate))
        measured = tuple(trial for trial in runs if trial.state is TrialState.MEASURED and trial.measurement)
        preferred = tuple(trial for trial in measured if not trial.source) or measured
        preferred = tuple(trial for trial in preferred if trial.is_final) or preferred
        return tuple(trial for trial in preferred if not _share_of_others(trial)) or preferred

    def reported_trial(self, trial: Trial | None) -> Trial | None:
        """Return the run that reports show for a trial's candidate.

        It is `trial` if that is imported or one of the candidate's runs, and has whole steps. Otherwise it is the run
        whose steps were shortened least.
        """
        runs = self.runs_of(trial.candidate) if trial else ()
        if trial is None or not runs or ((trial in runs or trial.source) and not trial.shortened):
            return trial
        return max(runs, key=lambda run: run.shortened.nodes if run.shortened else math.inf)

    def speed_of(self, candidate: Candidate) -> float:
        """Return a candidate's steps per second, from the median step time of its runs. 0 if it was not measured."""
        speeds = [speed(trial) for trial in self.runs_of(candidate)]
        return 1.0 / median(1.0 / each if each else math.inf for each in speeds) if speeds else 0.0

    def keeps_limits(self, candidate: Candidate) -> bool:
        """Return whether more than half of a candidate's measured runs met all limits."""
        runs = self.runs_of(candidate)
        return 2 * sum(not trial.measurement.broken for trial in runs if trial.measurement) > len(runs)

    @property
    def settled(self) -> frozenset[Candidate]:
        """The candidates with a conclusive trial. All other candidates may be tried again."""
        return frozenset(candidate for candidate, trial in self.by_candidate.items() if trial.is_conclusive)

    @property
    def rivals(self) -> tuple[Trial, ...]:
        """Trials of the candidates that do not differ significantly from the best, the fastest first."""
        best = self.best
        if best is None:
            return ()
        best_runs, best_speed = self.runs_of(best.candidate), self.speed_of(best.candidate)
        near_best = []
        for trial in self.trials:
            if trial.candidate == best.candidate or not self.keeps_limits(trial.candidate):
                continue
            runs, own_speed = self.runs_of(trial.candidate), self.speed_of(trial.candidate)
            if own_speed and not significant(best_speed / own_speed - 1.0, best_runs, runs):
                near_best.append(trial)
        return tuple(sorted(near_best, key=lambda trial: -self.speed_of(trial.candidate)))

    def contenders(self, control: Control) -> tuple[Trial, ...]:
        """Return the best trial and the rivals that may still be slower than it by more than the `indifference`.

        Empty if there are no such rivals.
        """
        if self.best is None:
            return ()
        best_runs, best_speed = self.runs_of(self.best.candidate), self.speed_of(self.best.candidate)
        undecided = []
        for rival in self.rivals[:MAX_RIVALS]:
            runs = self.runs_of(rival.candidate)
            slowdown = best_speed / self.speed_of(rival.candidate) - 1.0
            least = max(indifference(control, each) for each in (best_runs, runs))  # less cannot be distinguished
            if slowdown + _uncertainty(best_runs, runs) >= least:
                undecided.append(rival)
        return (self.best, *undecided) if undecided else ()

    @property
    def finalists(self) -> tuple[Trial, ...]:
        """One trial of each candidate to repeat: the measured baseline, the best and the fastest rivals, in this order.

        There are no duplicates. Empty if no candidate is the best yet.
        """
        if self.best is None:
            return ()
        baseline = self.baseline
        measured = (baseline,) if baseline and baseline.state is TrialState.MEASURED else ()
        chosen = {trial.candidate: trial for trial in (*measured, self.best, *self.rivals[:MAX_RIVALS])}
        return tuple(chosen.values())

    @property
    def repeated(self) -> tuple[Trial, ...]:
        """The finalists, and one trial of each other candidate that was disturbed."""
        candidates = {trial.candidate for trial in self.finalists}
        return (*self.finalists, *(trial for trial in self.disturbed if trial.candidate not in candidates))

    @property
    def disturbed(self) -> tuple[Trial, ...]:
        """Trials to repeat once, because they may be faster than the best without the programs that used their cores.

        At most MAX_DISTURBED, the one that may be fastest first. It is assumed that a trial slows down by the share of
        the cores that other programs use, the best as well.
        """
        if self.best is None:
            return ()
        best_s = _undisturbed_s(max(self.runs_of(self.best.candidate), key=_undisturbed_s))
        timed = [each for each in self.trials if each.is_conclusive and not each.source and each.measurement]
        slowed = [each for each in timed if _share_of_others(each) and each.candidate != self.best.candidate]
        slowed = sorted(slowed, key=_undisturbed_s)
        return tuple(each for each in slowed if _undisturbed_s(each) < best_s)[:MAX_DISTURBED]

    @property
    def drift(self) -> float | None:
        """The relative speedup from the first to the last run of the baseline. None if it ran once."""
        runs = self.runs_of(self.baseline.candidate) if self.baseline else ()
        return speed(runs[-1]) / speed(runs[0]) - 1.0 if len(runs) > 1 else None

    @property
    def drifted(self) -> bool:
        """Whether the drift of the baseline exceeds the noise of its runs."""
        change = self.drift
        if change is None or self.baseline is None:
            return False
        runs = self.runs_of(self.baseline.candidate)
        return abs(change) > max(noise([run]) for run in (runs[0], runs[-1]))


def overheads(control: Control, trials: Iterable[Trial]) -> list[float]:
    """Return the seconds that each trial spent outside its steps, mostly for its start.

    Trials for which these seconds are unknown are skipped.
    """
    overheads_s = (trial.overhead_s(control.train_iters, control.warmup_iters) for trial in trials)
    return [seconds for seconds in overheads_s if seconds is not None]


def speed(trial: Trial) -> float:
    """Return the steps per second of a trial, or 0 if it has no measurement."""
    return 1.0 / trial.measurement.step_time_s if trial.measurement and trial.measurement.step_time_s > 0 else 0.0


def _share_of_others(trial: Trial) -> float:
    return share_of_others(trial.measurement.telemetry) if trial.measurement else 0.0


def _undisturbed_s(trial: Trial) -> float:
    """Return the step time that a trial may have on cores that no other program uses, in seconds."""
    return trial.measurement.step_time_s * (1.0 - _share_of_others(trial)) if trial.measurement else math.inf


MIN_NOISE = 0.02
"""The minimum relative noise that is assumed between two runs of the same candidate. Chosen for runs minutes apart."""

MAX_RIVALS = 2
"""The maximum number of rivals of the best that run again. Chosen to limit the cost of repeats."""

MAX_DISTURBED = 2
"""The maximum number of trials that run again because other programs used their cores. Chosen to limit the cost of
repeats."""

SURE_GAIN = 10.0
"""The gain, relative to the noise, from which one repeat of the baseline is enough. Chosen by hand."""

EXTRA_ROUNDS = 1
"""The maximum number of rounds of repeats beyond `control.repeats`, of two candidates each. They run while it is
undecided whether the best is better than a rival. Chosen with simulated races: two rounds of three candidates choose no
better (benchmarks/README.md)."""


def noise(runs: Sequence[Trial]) -> float:
    """Return the relative noise of a candidate, at least MIN_NOISE.

    It is the maximum of the spread of steps, the spread between runs, and the uncertainty of scaled step times.
    """
    measured = [trial.measurement for trial in runs if trial.measurement]
    if not measured:
        return MIN_NOISE
    step_spread = median(each.spread_s / each.step_time_s if each.step_time_s > 0 else 0.0 for each in measured)
    speeds = [speed(trial) for trial in runs]
    median_speed = median(speeds)
    run_spread = (max(speeds) - min(speeds)) / 2 / median_speed if median_speed > 0 else 0.0
    return max(MIN_NOISE, step_spread, run_spread, *(trial.interval for trial in runs))


def indifference(control: Control, runs: Sequence[Trial]) -> float:
    """Return the relative difference below which two candidates count as equally fast.

    It is the maximum of `control.indifference` and the noise of the best candidate, whose runs are `runs`.
    """
    return max(control.indifference, noise(runs))


def significant(slowdown: float, first_runs: Sequence[Trial], second_runs: Sequence[Trial]) -> bool:
    """Return whether the difference between two candidates exceeds their noise.

    `slowdown`: the step time of the slower candidate over that of the faster one, minus one. `first_runs` and
    `second_runs`: the measured runs of each candidate.
    """
    # Times are compared, not speeds: noise is relative to a time and can exceed 100%, as can a slowdown, but not the
    # relative loss of speed.
    return slowdown >= _uncertainty(first_runs, second_runs)


def _uncertainty(first_runs: Sequence[Trial], second_runs: Sequence[Trial]) -> float:
    """Return the uncertainty of the slowdown between two candidates, from the measured runs of each.

    It is the larger noise of the two, divided by the square root of the smaller number of runs.
    """
    return max(noise(first_runs), noise(second_runs)) / math.sqrt(min(len(first_runs), len(second_runs)))


def min_repeats(control: Control, search_state: SearchState) -> dict[Candidate, int]:
    """Return the minimum number of repeats of each finalist.

    It is `control.repeats` if there are several finalists, else 0. It is at least 1 for a finalist whose run was not
    final. Unless `control.repeats` is 0, it is 1 for other disturbed trials, and for a baseline that is slower than the
    best by more than SURE_GAIN times the noise; a baseline of which all runs were disturbed runs once more.
    """
    trials = search_state.finalists
    rounds = control.repeats if len(trials) > 1 else 0
    disturbed = {trial.candidate: min(control.repeats, 1) for trial in search_state.disturbed}
    least = disturbed | {trial.candidate: rounds if trial.is_final else max(rounds, 1) for trial in trials}
    baseline, best = search_state.baseline, search_state.best
    if baseline and best and baseline.candidate in least:
        gain = search_state.speed_of(best.candidate) / search_state.speed_of(baseline.candidate) - 1.0
        if gain > SURE_GAIN * max(noise(search_state.runs_of(each.candidate)) for each in (baseline, best)):
            least[baseline.candidate] = min(least[baseline.candidate], 1)
        if control.repeats and is_disturbed(search_state.runs_of(baseline.candidate)):
            again = len(search_state.repeats_of(baseline.candidate)) + 1
            least[baseline.candidate] = max(least[baseline.candidate], min(again, control.repeats + EXTRA_ROUNDS))
    return least


def is_disturbed(runs: Sequence[Trial]) -> bool:
    """Return whether other programs used the cores of all `runs`."""
    return bool(runs) and all(map(_share_of_others, runs))


def next_repeat(control: Control, search_state: SearchState) -> Trial | None:
    """Return the trial to repeat next, or None if all repeats are done.

    The finalists run again in rotation, `min_repeats` times each. Then the best and an undecided rival run up to
    EXTRA_ROUNDS more times. The total number of repeats is also limited, because the best and its rivals may change.
    """
    trials, minimum = search_state.repeated, min_repeats(control, search_state)
    done = {trial.candidate: len(search_state.repeats_of(trial.candidate)) for trial in trials}
    max_rounds = control.repeats + EXTRA_ROUNDS
    most = max(control.repeats, 1) * (2 + MAX_RIVALS) + 2 * EXTRA_ROUNDS
    if sum(trial.is_conclusive for trial in search_state.repeats) >= most:
        return None
    waiting = [trial for trial in trials if done[trial.candidate] < minimum[trial.candidate]]
    if not waiting and control.repeats:
        contenders = search_state.contenders(control)
        waiting = [trial for trial in contenders if done[trial.candidate] < max_rounds]
    return min(waiting, key=lambda trial: done[trial.candidate], default=None)


MAX_FAILED_AT_START = 5
"""The search stops if at least this many trials ended and all are in FAILED_STATES. Chosen, because the task is then
probably wrong."""
SHORTEST = 0.4
"""The time reserved for the next trial, relative to a trial that ran out of time before its last step. It is below 1
because that trial started while modules were imported, and because a faster candidate needs less time. Chosen."""
AFTER_TIMEOUT = 0.1
"""The time reserved for the next trial, relative to a trial that timed out, if nothing is measured yet. Chosen: a
candidate that is more than ten times faster is rare."""
FAILED_STATES = (TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT)


def stop_reason(control: Control, search_state: SearchState, elapsed: float, pending: int = 0) -> str | None:
    """Return the reason why the search stops, or None if it continues. Time is reserved for one more trial and for
    repeats.

    `elapsed`: seconds since the start of the search.
    `pending`: the number of trials that are running.
    """
    trials = _completed_trials(search_state)
    if len(trials) >= MAX_FAILED_AT_START and all(trial.state in FAILED_STATES for trial in trials):
        return Message("the first {count} trials all failed", count=len(trials))
    if len(trials) + pending >= control.max_trials:
        return Message("max_trials = {count} reached", count=control.max_trials)
    if control.max_time is None:
        return None
    measured = [(trial.duration_s, trial.measurement) for trial in trials if trial.state is TrialState.MEASURED]
    trial_seconds = [seconds * (SHORTEST if each and each.few_steps else 1.0) for seconds, each in measured]
    late = [trial.duration_s * AFTER_TIMEOUT for trial in trials if trial.state is TrialState.TIMED_OUT]
    reserved = max(trial_seconds or late, default=0.0) + repeats_seconds(control, search_state)
    if control.max_time - elapsed > reserved:
        return None
    text = N_("after {elapsed:.0f} s, max_time = {seconds:g} s leaves no time for another trial and repeats")
    return Message(text, elapsed=elapsed, seconds=control.max_time)


SLACK = 3.0
"""The time limit of a trial's steps, relative to the upper bound of their predicted time. It allows for other jobs,
slow file systems and compilation. Chosen by hand: the limit ends trials that hang, not slow ones."""

UNKNOWN_SECONDS = 3600.0
"""The time limit of a trial whose step time is not predicted. Chosen by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTime:
    """The maximum number of trials and repeats of a search, and the time that they take.

    `measuring_s`: the predicted seconds of all their steps or loads. None if unknown.
    `at_most_s`: the seconds if each trial runs until its time limit.
    """

    trials: int
    repeats: int
    measuring_s: float | None
    at_most_s: float


def seconds_left(
    control: Control, search_state: SearchState, candidates: int, elapsed: float, parallel_trials: int = 1
) -> float | None:
    """Return an estimate of the remaining seconds of the run, including repeats, or None before the first trial ends.

    `candidates`: the number of candidates that were tried or may be tried.

    While trials remain, the estimate assumes that the baseline and one other candidate will be repeated.
    """
    trials = _completed_trials(search_state)
    if not trials:
        return None
    duration_s = sum(trial.duration_s for trial in trials) / len(trials)
    trials_left = max(0, min(control.max_trials, candidates) - len(trials))
    repeats_s = repeats_seconds(control, search_state, at_most=True)
    if trials_left:
        repeats_s = max(repeats_s, 2 * control.repeats * duration_s)
    remaining_s = duration_s / parallel_trials * trials_left + repeats_s
    return remaining_s if control.max_time is None else min(remaining_s, max(0.0, control.max_time - elapsed))


def repeats_seconds(control: Control, search_state: SearchState, *, at_most: bool = False) -> float:
    """Return the minimum time of the remaining repeats in seconds, or the maximum time if `at_most` is true."""
    minimum = min_repeats(control, search_state)
    racing = search_state.contenders(control) if at_most and control.repeats else ()
    extra = {trial.candidate: EXTRA_ROUNDS for trial in racing[:2]}
    remaining = (
        (
            trial,
            minimum[trial.candidate] + extra.get(trial.candidate, 0) - len(search_state.repeats_of(trial.candidate)),
        )
        for trial in search_state.repeated
    )
    return sum((max(0, runs) * _repeat_seconds(control, trial) for trial, runs in remaining), 0.0)


def has_time_to_repeat(control: Control, trial: Trial, elapsed: float) -> bool:
    """Return whether `trial` can be repeated within `control.max_time`, of which `elapsed` seconds are over."""
    return control.max_time is None or elapsed + _repeat_seconds(control, trial) <= control.max_time


REPEAT_SLACK = 1.2
"""The time reserved for a repeat, relative to the run before it. Chosen by hand: runs of a candidate differ by a few
percent, and a trial reserves a tenth of its time limit for its end."""


def _repeat_seconds(control: Control, trial: Trial) -> float:
    """Return the seconds to reserve for a repeat of `trial`, whose steps are not shortened."""
    measured, seconds = trial.measurement, trial.duration_s
    if measured and measured.scaled_from is not None and not trial.fewer_nodes:
        seconds += control.train_iters * (measured.step_time_s - measured.scaled_from)
    return REPEAT_SLACK * seconds


def _completed_trials(search_state: SearchState) -> list[Trial]:
    return [trial for trial in search_state.trials if trial.is_conclusive and not trial.source]
