"""What a search and its trials may spend: the budget of the run, time limits, and why the search stops."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from statistics import median
from typing import NamedTuple

import numpy as np

from flagcore.contracts import Platform, Problem, SearchContext
from flagcore.domain.chip import MUCH_SLOWER, disturbances, slowness
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control, Task
from flagcore.domain.steps import MIN_STEPS, SLACK, UNKNOWN_SECONDS
from flagcore.domain.trial import FAILED_STATES, PROBE, RUN, Role, TimeLimit, Trial, TrialState
from flagcore.i18n import N_, Message
from flagcore.tuner.effects import engine_candidate
from flagcore.tuner.learning import expected_step_times, fastest_open_rows, overhead_seconds, overheads
from flagcore.tuner.probe import ranks_to_probe
from flagcore.tuner.search_state import SearchState, min_repeats

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
    repeats_s = repeats_seconds(control, search_state) if len(trials) > 1 else 0.0  # one alone needs no comparison
    reserved = max(trial_seconds or late, default=0.0) + repeats_s
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
    repeats_s = repeats_seconds(control, search_state)
    if trials_left:
        repeats_s = max(repeats_s, 2 * control.repeats * duration_s)
    remaining_s = duration_s / parallel_trials * trials_left + repeats_s
    return remaining_s if control.max_time is None else min(remaining_s, max(0.0, control.max_time - elapsed))


def repeats_seconds(control: Control, search_state: SearchState) -> float:
    """Return the time of the remaining repeats in seconds."""
    minimum = min_repeats(control, search_state)

    def runs_left(candidate: Candidate) -> int:
        return max(0, minimum[candidate] - len(search_state.repeats_of(candidate)))

    return sum((runs_left(each.candidate) * _repeat_seconds(control, each) for each in search_state.repeated), 0.0)


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


class Budget(NamedTuple):
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

    def exceeds(self, ended: str) -> bool:
        """Return whether the limit that ended a search, as `stop_reason` names it, is now higher."""
        found = re.search(r"(max_trials|max_time) = (\d\S*)", ended)
        return found is not None and float(found[2]) < (getattr(self.control, found[1]) or math.inf)

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


START_SLACK = 2.0
"""The time limit of a trial's start, relative to the longest start of the run so far. Chosen by hand."""

RESERVE = 0.05
"""The share of a trial's time limit that is reserved for the time after its steps: writing results, and the end of its
processes. Chosen by hand."""


def time_limit(platform: Platform, trial: Trial, earlier: Sequence[Trial], ranks: int | None = None) -> TimeLimit:
    """Return the time limit of a trial, given the `earlier` trials of the run.

    `ranks`: the number of ranks of a probe, which are launched one after the other and do not depend on `earlier`
    trials; by default, as many as `ranks_to_probe` returns.

    It is `control.max_time_per_task` if this is set. Otherwise, each launch gets the time to start plus SLACK times the
    upper bound of its steps. Both are increased if `earlier` trials took longer, including trials that ended before
    they were measured.
    """
    task, control = platform.task, platform.task.spec.control
    if (limit_s := control.max_time_per_task) is not None:
        return TimeLimit(seconds=limit_s, because=f"auto_tuner.control.max_time_per_task = {limit_s:g} s")
    start, launches = task.spec.work.start_seconds, 1
    if trial.fidelity == PROBE:
        earlier, launches = (), ranks or len(ranks_to_probe(platform, trial.candidate))
    longest = START_SLACK * max(overheads(control, earlier), default=0.0)
    because = f"{start:g} s to start" if start >= longest else f"{longest:.0f} s to start, twice the longest so far"
    steps = 0.0
    if task.spec.work.has_steps:
        step = _slowest_step(trial, earlier)
        if step is None:
            return TimeLimit(seconds=UNKNOWN_SECONDS, because=f"{UNKNOWN_SECONDS:g} s without a predicted step time")
        steps = SLACK * control.train_iters * step
        because += f" + {SLACK:g} x {control.train_iters} steps of at most ~{step:.3g} s"
    because = because if launches == 1 else f"{launches} x ({because})"
    return TimeLimit(seconds=launches * (max(start, longest) + steps), because=because)


def with_target(limit: TimeLimit, task: Task, trial: Trial, share_s: float, earlier: Sequence[Trial]) -> TimeLimit:
    """Return `limit` with a target, the time after which a training trial ends with fewer steps.

    The target is `share_s`, the trial's share of the remaining time of the search. It is at least the predicted
    duration of the trial, and leaves RESERVE of the limit for the end of the trial. The trial is assumed to start in
    the median time of the `earlier` trials.
    """
    if not task.spec.work.has_steps:
        return limit
    control, step = task.spec.control, _slowest_step(trial, ())
    start = median(overheads(control, earlier) or [0.0])
    expected = start + control.train_iters * step if step else limit.seconds
    return replace(limit, target_s=min(max(share_s, expected), (1.0 - RESERVE) * limit.seconds))


def cap_limit(limit: TimeLimit, seconds_left: float, key: str) -> TimeLimit:
    """Return `limit`, reduced to `seconds_left` if that is less, but to no less than a second.

    `key`: the option that limits the remaining time. The reason for the limit names it.
    """
    if seconds_left >= limit.seconds:
        return limit
    return TimeLimit(seconds=max(1.0, seconds_left), because=f"the rest of {key}")


def _slowest_step(trial: Trial, earlier: Sequence[Trial]) -> float | None:
    """Return the longest likely step time of a trial in seconds, or None if the time is not predicted."""
    step = trial.predicted.step if trial.predicted else None
    if step is None or not math.isfinite(step.high):
        return None
    measured = (each for each in earlier if each.state in (TrialState.MEASURED, TrialState.STOPPED))
    ratios = [ratio for each in measured if (ratio := each.measured_over(each.predicted))]
    ratios += [
        max(each.finished_steps_s) / (each.predicted_step_s or math.inf)
        for each in earlier
        if each.has_only_finished_steps
    ]
    return max([step.high, *(ratio * step.value for ratio in ratios)]) / trial.scale


def seconds_used(trials: Sequence[Trial]) -> float:
    """Return the seconds that earlier calls of a run took, including the time between its trials."""
    ends = [trial.began_s + trial.duration_s for trial in trials if trial.began_s is not None]
    return max([*ends, math.fsum(trial.duration_s for trial in trials if trial.group is None)])


MIN_TRIALS = 4
"""The number of trials, including the baseline, that share the time of a search with slow steps. Messages advise enough
time for this number. Chosen by hand: fewer trials compare too little."""

MAX_WITHOUT_STEP = 2
"""The search ends if this number of trials reach their time limit, and no trial has finished a step. Chosen by hand."""

SUGGESTED_SLACK = 1.2
"""The time that messages advise, relative to the expected time. Chosen by hand."""


def share_of_time(control: Control, state: SearchState, role: Role, candidates: int, left: float | None) -> float:
    """Return the part of the `left` seconds of a search that its next trial may use. It is infinite if `left` is None.

    `candidates`: the number of candidates, including those that already have a trial.
    """
    if left is None:
        return math.inf
    minimum = min_repeats(control, state)
    repeats = sum(max(0, runs - len(state.repeats_of(candidate))) for candidate, runs in minimum.items())
    if role is Role.REPEAT:
        return left / max(1, repeats)
    trials = max(1, min(MIN_TRIALS, control.max_trials, candidates) - len(state.settled))
    return left / (trials + max(repeats, 2 * control.repeats))


def why_no_trial(context: SearchContext) -> Message | None:
    """Return why no further trial has enough time for a measurement, and what to change. Returns None if one has.

    The result is None unless the last trial ended before its last step. Otherwise, the search ends if fp32 is much
    faster than the precision of the job. If nothing is measured, it also ends if no open candidate is expected to
    finish two steps in a trial, or if MAX_WITHOUT_STEP trials finished no step or hung. A search for servers ends if
    MAX_WITHOUT_STEP trials reached their time limit, and nothing is measured.
    """
    trials = [trial for trial in context.trials if not trial.source]
    if not trials or not is_cut_short(trials[-1]):
        return None  # this function is called after every trial, so the cheap test comes first
    is_measured = any(trial.state is TrialState.MEASURED for trial in trials)
    if not context.task.spec.work.has_steps:
        return None if is_measured else _why_no_load(trials)
    if not is_measured and sum(trial.silent_s > 0 for trial in trials) >= MAX_WITHOUT_STEP:
        return _about(trials[-1], N_("trials hang after their first step; trial {number}: {reason}"))
    return _why_no_steps(context, trials, is_measured)


def _why_no_steps(context: SearchContext, trials: Sequence[Trial], is_measured: bool) -> Message | None:
    """Return why no training trial has enough time for its steps, and what to change. Returns None if one has."""
    task, control = context.task, context.task.spec.control
    last, start = trials[-1], overhead_seconds(context)
    row, step = _shortest_step(context, last.candidate)
    seconds_left = math.inf if context.seconds_left is None else context.seconds_left
    limit = min(control.max_time_per_task or math.inf, seconds_left)
    if len(trials) >= MAX_WITHOUT_STEP and not any(trial.step_seen_s for trial in trials):
        step = max(step, last.duration_s - start)
    faster = _faster_precision(task)
    if faster is None and (is_measured or start + MIN_STEPS * step <= limit):
        return None
    longest = max(step, last.step_seen_s or 0.0)
    causes, changes = list(disturbances((last.measurement or last).telemetry)), _more_time(control, longest, start)
    if faster is not None:
        causes.insert(0, faster[0])
        changes.insert(0, faster[1])
    if change := _shorter_steps(context, row, step, (limit - start) / control.train_iters):
        changes.append(change)
    # Without a change, the settings are long enough: only the rest of the search is too short.
    return _too_little_time(last, causes, changes) if changes else None


def _shortest_step(context: SearchContext, tried: Candidate) -> tuple[int, float]:
    """Return the row of the open candidate, or of `tried`, with the shortest expected step, and its seconds."""
    tried_row = context.space.find(tried)
    rows = fastest_open_rows(context)
    rows = rows if tried_row is None else np.append(rows, tried_row)
    steps = expected_step_times(context, rows)
    return int(rows[np.argmin(steps)]), float(steps.min())


def _too_little_time(trial: Trial, causes: Sequence[str], changes: Sequence[str]) -> Message:
    """Return a message on a trial that was cut short, what slowed it down, and alternative changes of the spec."""
    text = _about(trial, N_("trial {number}: {reason}"))
    if causes:
        text = Message("{trial}; {why}", trial=text, why=joined(causes, N_("{first}; {second}")))
    changes_text = joined(changes, N_("{first}, or {second}"))
    return Message("too little time for the steps of trials; {trial}; set {changes}", trial=text, changes=changes_text)


def _why_no_load(trials: Sequence[Trial]) -> Message | None:
    timed_out = [trial for trial in trials if trial.state is TrialState.TIMED_OUT]
    if len(timed_out) < MAX_WITHOUT_STEP:
        return None
    longest = max(timed_out, key=lambda trial: trial.duration_s)  # its reason has the best estimate of the needed time
    return _about(longest, N_("trials have too little time to send their load; trial {number}: {reason}"))


def _about(trial: Trial, template: str) -> Message:
    """Return a message with the number of a trial, and with the reason for its end, or else its state."""
    return Message(template, number=trial.number, reason=trial.reason or trial.state.value)


def is_cut_short(trial: Trial) -> bool:
    """Return whether a trial ended before its last step because its time was over."""
    return trial.state is TrialState.TIMED_OUT or (trial.measurement is not None and trial.measurement.few_steps)


def joined(texts: Sequence[str], template: str) -> str:
    """Join several messages to one with `template`, which contains the fields `first` and `second`."""
    return reduce(lambda first, second: Message(template, first=first, second=second), texts)


def _faster_precision(task: Task) -> tuple[Message, Message] | None:
    """Return a message with the rates of the task's precision and of fp32, and the change to fp32.

    Returns None unless fp32 is much faster on the chip.
    """
    chip, name = task.cluster.groups[0].chip, task.spec.work.precision
    if (factor := slowness(chip, name)) < MUCH_SLOWER:
        return None
    slow, fast = (chip.dense_flops_per_second[each].value / 1e9 for each in (name, "fp32"))
    text = N_("matrix products reach {slow:.3g} GFLOP/s in {name} and {fast:.3g} in {best}")
    why = Message(text, slow=slow, name=name, fast=fast, best="fp32")
    return why, Message("train.precision: {best} ({factor:.0f} times faster here)", best="fp32", factor=factor)


def _more_time(control: Control, step: float, start: float) -> list[str]:
    """Return the keys and values of a spec, such as `max_time: 120`, that give trials enough time for all steps.

    `step`: the seconds of a step. `start`: the seconds from the start of a trial to its first step.
    """
    trial_s = 10 * math.ceil(SUGGESTED_SLACK * (start + control.train_iters * step) / 10.0)
    changes = list[str]()
    if control.max_time_per_task is not None and control.max_time_per_task < trial_s:
        changes.append(f"auto_tuner.control.max_time_per_task: {trial_s}")
    if control.max_time is not None and control.max_time < MIN_TRIALS * trial_s:
        longer = f"auto_tuner.control.max_time: {MIN_TRIALS * trial_s}"
        changes = [joined([*changes, longer], N_("{first} and {second}"))]
    return changes


def _shorter_steps(context: SearchContext, row: int, step: float, fits: float) -> Message | None:
    """Return the change that shortens steps to about `fits` seconds, with fewer micro-batches.

    `step`: seconds of a whole step. Returns None if the candidate's steps cannot be shortened.
    """
    if fits <= 0.0:
        return None
    task, candidate = context.task.for_engine(), engine_candidate(context.task, context.space.candidate(row))
    if context.problem.engine.shorter_batch(task, candidate, fits / step) is None:
        return None
    return Message("auto_tuner.control.max_step_time: {seconds:.2g} (steps of fewer micro-batches)", seconds=fits)
