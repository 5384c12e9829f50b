"""What a search may spend: its trials and its time, when it stops, and how many seconds are left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flagcore.contracts import Problem
from flagcore.domain.spec import Control
from flagcore.domain.trial import FAILED_STATES, PROBE, RUN, TimeLimit, Trial, TrialState
from flagcore.i18n import N_, Message
from flagcore.tuner.limits import cap_limit, seconds_used, share_of_time, time_limit, with_target
from flagcore.tuner.search_state import EXTRA_ROUNDS, SearchState, min_repeats

MAX_FAILED_AT_START = 5
"""The search stops if at least this many trials ended and all are in FAILED_STATES. Chosen, because the task is then
probably wrong."""
SHORTEST = 0.4
"""The time reserved for the next trial, relative to a trial that ran out of time before its last step. It is below 1
because that trial started while modules were imported, and because a faster candidate needs less time. Chosen."""
AFTER_TIMEOUT = 0.1
"""The time reserved for the next trial, relative to a trial that timed out, if nothing is measured yet. Chosen: a
candidate that is more than ten times faster is rare."""


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


MAX_SHARE_OF_PROBES = 0.5
"""The maximum share of `control.max_time` for probes before the first run."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The trials and the time of one run.

    `control`: the limits of the spec. Only runs are repeated.
    `seconds_before`: the seconds that earlier calls of a resumed run have taken.
    `started`: when this call started, as `time.monotonic` tells it.
    """

    control: Control
    seconds_before: float
    started: float

    @classmethod
    def of(cls, control: Control, stored: Sequence[Trial], started: float) -> Budget:
        """Return the budget of a run whose earlier calls have `stored` trials."""
        own = [trial for trial in stored if not trial.source]
        counted = [trial for trial in own if trial.fidelity == control.fidelity or control.probes]
        return cls(control if control.fidelity == RUN else replace(control, repeats=0), seconds_used(counted), started)

    @property
    def elapsed(self) -> float:
        """The seconds that this run has taken, including earlier calls of a resumed run."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        """The seconds until `control.max_time`. None without such a limit."""
        return None if self.control.max_time is None else self.control.max_time - self.elapsed

    @property
    def seconds_for_probes(self) -> float:
        """The seconds that are left for probes before the first run."""
        limit = self.control.max_time
        return math.inf if limit is None else limit * MAX_SHARE_OF_PROBES - self.elapsed

    def time_limit(self, problem: Problem, trial: Trial, state: SearchState, candidates: int) -> TimeLimit:
        """Return the time limit of a trial: at most the time that is left for the run, or for the probes before it.

        `candidates`: the number of candidates that have a trial or may get one.
        """
        earlier, seconds_left = (*state.trials, *state.repeats), None
        limit = time_limit(problem.platform, trial, earlier)
        if max_time := self.control.max_time:
            is_early_probe = trial.fidelity == PROBE and self.control.fidelity == RUN
            seconds_left = self.seconds_for_probes if is_early_probe else max_time - self.elapsed
            limit = cap_limit(limit, seconds_left, f"auto_tuner.control.max_time = {max_time:g} s")
        if trial.fidelity == PROBE:
            return limit
        share = share_of_time(self.control, state, trial.role, candidates, seconds_left)
        return with_target(limit, problem.task, trial, share, earlier)
