"""What a search may spend: when it stops, what it repeats, and how many seconds are left."""

from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control
from flagcore.domain.trial import FAILED_STATES, Trial, TrialState, is_disturbed
from flagcore.i18n import N_, Message
from flagcore.tuner.search_state import MAX_RIVALS, SearchState, noise

SURE_GAIN = 10.0
"""The gain, relative to the noise, from which one repeat of the baseline is enough. Chosen by hand."""

EXTRA_ROUNDS = 1
"""The maximum number of rounds of repeats beyond `control.repeats`, of two candidates each. They run while it is
undecided whether the best is better than a rival. Chosen with simulated races: two rounds of three candidates choose no
better (benchmarks/README.md)."""


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
