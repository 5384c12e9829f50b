"""The budget of a run in seconds and trials."""

from __future__ import annotations

from flagcore.domain.noise import EXTRA_ROUNDS, contenders, rivals
from flagcore.domain.search_state import SearchState
from flagcore.domain.spec import Control
from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import Message

MAX_FAILED_AT_START = 5
"""If the first trials, so many, all ended in FAILED_STATES, the task is wrong and not the candidates."""
FAILED_STATES = (TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT)


def stop_reason(control: Control, search_state: SearchState, elapsed: float) -> str | None:
    """Return why the search stops, or None. Time is reserved for repeats and for one more trial."""
    trials = _ended(search_state)
    if len(trials) >= MAX_FAILED_AT_START and all(trial.state in FAILED_STATES for trial in trials):
        return Message("the first {count} trials all failed", count=len(trials))
    if len(trials) >= control.max_trials:
        return Message("max_trials = {count} reached", count=control.max_trials)
    if control.max_time is None:
        return None
    measured = [trial.duration_s for trial in trials if trial.state is TrialState.MEASURED]
    needed = max(measured, default=0.0) + repeats_seconds(control, search_state)
    left = control.max_time - elapsed
    return Message("max_time = {seconds:g} s reached", seconds=control.max_time) if left <= needed else None


def trial_timeout(control: Control, elapsed: float) -> float:
    """Return the seconds that the next trial may take: its own limit or the rest of the run's, at least one."""
    if control.max_time is None:
        return control.max_time_per_task
    return max(1.0, min(control.max_time_per_task, control.max_time - elapsed))


def seconds_left(control: Control, search_state: SearchState, candidates: int, elapsed: float) -> float | None:
    """Return an estimate of the rest of the run at the pace so far, with all repeats that may come.

    None before the first trial.
    """
    trials = _ended(search_state)
    if not trials:
        return None
    pace = sum(trial.duration_s for trial in trials) / len(trials)
    left = pace * max(0, min(control.max_trials, candidates) - len(trials))
    left += repeats_seconds(control, search_state, at_most=True)
    return left if control.max_time is None else min(left, max(0.0, control.max_time - elapsed))


def repeats_seconds(control: Control, search_state: SearchState, *, at_most: bool = False) -> float:
    """Return the least, or the most, seconds that the remaining repeats take."""
    rounds = control.repeats
    if at_most and rounds and rivals(search_state):
        rounds += EXTRA_ROUNDS
    left = ((trial, rounds - len(search_state.repeats_of(trial.candidate))) for trial in contenders(search_state))
    return sum((max(0, runs) * trial.duration_s for trial, runs in left), 0.0)


def has_time_to_repeat(control: Control, trial: Trial, elapsed: float) -> bool:
    """Return whether there is time to run `trial` again."""
    return control.max_time is None or elapsed + trial.duration_s <= control.max_time


def _ended(search_state: SearchState) -> list[Trial]:
    return [trial for trial in search_state.trials if trial.state is not TrialState.INTERRUPTED and not trial.source]
