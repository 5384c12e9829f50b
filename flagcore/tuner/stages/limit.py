"""limit: the time limits of trials and of the search, and the reasons to start no trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from statistics import median
from typing import Any

import numpy as np

from flagcore.contracts import Platform, Problem, SearchContext
from flagcore.domain.chip import MUCH_SLOWER, disturbances, slowness
from flagcore.domain.effects import engine_candidate, engine_task
from flagcore.domain.plan import measured_to_predicted
from flagcore.domain.search_state import EXTRA_ROUNDS, MAX_RIVALS, SearchState, SearchTime, min_repeats, overheads
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Control, Task, TrainSpec
from flagcore.domain.trial import MIN_STEPS, Role, TimeLimit, Trial, TrialState
from flagcore.i18n import N_, Message
from flagcore.tuner.learning.trials import expected_step_times, fastest_open_rows, overhead_seconds

SLACK = 3.0
"""The time limit of steps relative to the upper bound of their prediction, because of other jobs, slow file systems and
compilation. Chosen: the limit ends trials that hang, not slow ones."""

START_SLACK = 2.0
"""The time limit of a start relative to the longest start of the run so far. Chosen."""

RESERVE = 0.05
"""The share of a trial's time limit for what follows its steps: writing results, and the end of its processes.
Chosen."""

UNKNOWN_SECONDS = 3600.0
"""The limit of a trial whose step time is not predicted. Chosen."""


def time_limit(platform: Platform, trial: Trial, earlier: Sequence[Trial], launches: int = 1) -> TimeLimit:
    """Return the time limit of a trial with `launches` consecutive launches.

    It is `control.max_time_per_task` or, for each launch, the time to start plus SLACK times the upper bound of the
    steps. Both are increased if `earlier` trials took longer, also those that ended before they were measured.
    """
    task, control = platform.task, platform.task.spec.control
    if (given := control.max_time_per_task) is not None:
        return TimeLimit(seconds=given, because=f"auto_tuner.control.max_time_per_task = {given:g} s")
    start = platform.workload.start_seconds
    longest = START_SLACK * max(overheads(control, earlier), default=0.0)
    because = f"{start:g} s to start" if start >= longest else f"{longest:.0f} s to start, twice the longest so far"
    steps = 0.0
    if isinstance(task.spec.work, TrainSpec):
        step = _slowest_step(trial, earlier)
        if step is None:
            return TimeLimit(seconds=UNKNOWN_SECONDS, because=f"{UNKNOWN_SECONDS:g} s without a predicted step time")
        steps = SLACK * control.train_iters * step
        because += f" + {SLACK:g} x {control.train_iters} steps of at most ~{step:.3g} s"
    because = because if launches == 1 else f"{launches} x ({because})"
    return TimeLimit(seconds=launches * (max(start, longest) + steps), because=because)


def with_target(limit: TimeLimit, task: Task, trial: Trial, share_s: float, earlier: Sequence[Trial]) -> TimeLimit:
    """Return `limit` with the time after which a training trial ends with fewer steps.

    It is `share_s`, the trial's share of the remaining time of the search, but not less than the trial is predicted to
    take, and it leaves RESERVE of the limit for the end of the trial.
    """
    if not isinstance(task.spec.work, TrainSpec):
        return limit
    control, step = task.spec.control, _slowest_step(trial, ())
    start = median(overheads(control, earlier) or [0.0])
    expected = start + control.train_iters * step if step else limit.seconds
    return replace(limit, target_s=min(max(share_s, expected), (1.0 - RESERVE) * limit.seconds))


def cap_limit(limit: TimeLimit, seconds_left: float, key: str) -> TimeLimit:
    """Return `limit`, or a limit of `seconds_left` if that is less, but at least a second.

    `key` describes the option that limits the remaining time.
    """
    if seconds_left >= limit.seconds:
        return limit
    return TimeLimit(seconds=max(1.0, seconds_left), because=f"the rest of {key}")


def _slowest_step(trial: Trial, earlier: Sequence[Trial]) -> float | None:
    step: Any = trial.predicted.get("step_time_s")
    if not isinstance(step, Mapping) or not math.isfinite(step["high"]):
        return None
    measured = (each for each in earlier if each.state in (TrialState.MEASURED, TrialState.STOPPED))
    ratios = [ratio for each in measured if (ratio := measured_to_predicted(each, "predicted"))]
    ratios += [
        max(each.finished_steps_s) / (each.predicted_step_s or math.inf)
        for each in earlier
        if each.has_only_finished_steps
    ]
    high: float = max([step["high"], *(ratio * step["value"] for ratio in ratios)])
    return high / trial.scale


def search_time(problem: Problem) -> SearchTime:
    """Return the estimated time of a search that tries the candidates with the fastest predictions."""
    task, control, predictions = problem.task, problem.task.spec.control, problem.predictions
    start_seconds, rows = problem.workload.start_seconds, problem.pruned.open_rows
    if rows.size > control.max_trials:
        step = np.nan_to_num(predictions.step_time_s[rows], nan=np.inf)
        rows = rows[np.argpartition(step, control.max_trials)[: control.max_trials]]
    max_step = control.max_step_time or math.inf
    # if steps are shortened, the finalists run again with whole steps
    is_shortened = bool((predictions.step_time_s[rows] > max_step).any())
    rounds = control.repeats + EXTRA_ROUNDS if control.repeats and rows.size > 1 else int(is_shortened)
    repeats = rounds * min(2 + MAX_RIVALS, int(rows.size))

    def seconds_of_steps(seconds: FloatArray) -> float:
        trial_seconds = float(np.minimum(seconds, max_step).sum())  # longer steps are shortened
        return control.train_iters * (trial_seconds + repeats * float(np.max(seconds, initial=0.0)))

    is_training = isinstance(task.spec.work, TrainSpec)
    predicted, high = (seconds_of_steps(column[rows]) for column in (predictions.step_time_s, predictions.high_s))
    limit = control.max_time_per_task
    if limit is not None:
        at_most = (rows.size + repeats) * limit
    elif not is_training:
        at_most = (rows.size + repeats) * start_seconds
    elif math.isfinite(high):
        at_most = (rows.size + repeats) * start_seconds + SLACK * high
    else:
        at_most = (rows.size + repeats) * UNKNOWN_SECONDS
    return SearchTime(
        trials=int(rows.size),
        repeats=repeats,
        steps_s=predicted if is_training and math.isfinite(predicted) else None,
        at_most_s=min(at_most, control.max_time or math.inf),
    )


def seconds_used(trials: Sequence[Trial]) -> float:
    """Return the seconds that earlier calls of a run took, including the time between trials."""
    ends = [trial.began_s + trial.duration_s for trial in trials if trial.began_s is not None]
    return max([*ends, math.fsum(trial.duration_s for trial in trials if trial.group is None)])


MIN_TRIALS = 4
"""The number of trials, with the baseline, that share the time of a search with slow steps, and for which the advised
time is enough. Chosen: fewer trials compare too little."""

MAX_WITHOUT_STEP = 2
"""The search ends if its first trials, this number, reach their time limit without a step. Chosen."""

SUGGESTED_SLACK = 1.2
"""The time that a message advises, relative to the expected time. Chosen."""


def share_of_time(control: Control, state: SearchState, role: Role, candidates: int, left: float | None) -> float:
    """Return the share of the `left` seconds of a search for its next trial; infinite without a limit.

    `candidates` is the number of candidates, those with a trial among them.
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
    """Return why no further trial can be measured in its time, and what to change; None if one can.

    This is decided after a trial that ended before its last step. If fp32 is much faster than the precision, the search
    ends then; otherwise it ends if nothing is measured, and two steps of no open row are expected to fit in a trial, or
    MAX_WITHOUT_STEP trials had no step.
    """
    task, control = context.task, context.task.spec.control
    trials = [trial for trial in context.trials if not trial.source]
    if not isinstance(task.spec.work, TrainSpec) or not trials or not is_cut_short(trials[-1]):
        return None  # asked after every trial, so this comes first
    last, start = trials[-1], overhead_seconds(context)
    found = context.space.find(last.candidate)
    rows = fastest_open_rows(context)
    rows = rows if found is None else np.append(rows, found)
    steps = expected_step_times(context, rows)
    row, step = int(rows[np.argmin(steps)]), float(steps.min())
    left = math.inf if context.seconds_left is None else context.seconds_left
    limit = min(control.max_time_per_task or math.inf, left)
    is_measured = any(trial.state is TrialState.MEASURED for trial in trials)
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
    fits = (limit - start) / control.train_iters
    if change := _shorter_steps(context, row, step, fits):
        changes.append(change)
    text = Message("trial {number}: {reason}", number=last.number, reason=last.reason or last.state.value)
    if causes:
        text = Message("{trial}; {why}", trial=text, why=joined(causes, N_("{first}; {second}")))
    changes_text = joined(changes, N_("{first}, or {second}"))
    return Message("too little time for the steps of trials; {trial}; set {changes}", trial=text, changes=changes_text)


def is_cut_short(trial: Trial) -> bool:
    """Return whether a trial ended before its last step because its time was over."""
    return trial.state is TrialState.TIMED_OUT or (trial.measurement is not None and trial.measurement.few_steps)


def joined(texts: Sequence[str], template: str) -> str:
    """Return one message from several; `template` has the fields `first` and `second`."""
    return reduce(lambda first, second: Message(template, first=first, second=second), texts)


def _faster_precision(task: Task) -> tuple[Message, Message] | None:
    """Return the rates of the task's precision and of fp32 if that is much faster on its chip, and the change to it."""
    chip, name = task.cluster.groups[0].chip, task.spec.train.precision
    if (factor := slowness(chip, name)) < MUCH_SLOWER:
        return None
    slow, fast = (chip.dense_flops_per_second[each].value / 1e9 for each in (name, "fp32"))
    text = N_("a device multiplies with {slow:.3g} GFLOP/s in {name}, with {fast:.3g} in {best}")
    why = Message(text, slow=slow, name=name, fast=fast, best="fp32")
    return why, Message("train.precision: {best} ({factor:.0f} times faster here)", best="fp32", factor=factor)


def _more_time(control: Control, step: float, start: float) -> list[str]:
    """Return the changes of time limits with which trials finish their steps."""
    trial = 10 * math.ceil(SUGGESTED_SLACK * (start + control.train_iters * step) / 10.0)
    changes = list[str]()
    if control.max_time_per_task is not None and control.max_time_per_task < trial:
        changes.append(f"auto_tuner.control.max_time_per_task: {trial}")
    if control.max_time is not None and control.max_time < MIN_TRIALS * trial:
        longer = f"auto_tuner.control.max_time: {MIN_TRIALS * trial}"
        changes = [joined([*changes, longer], N_("{first} and {second}"))]
    return changes


def _shorter_steps(context: SearchContext, row: int, step: float, fits: float) -> Message | None:
    """Return the change with which steps of about `fits` seconds run fewer micro-batches, if the row can."""
    if fits <= 0.0:
        return None
    task, candidate = engine_task(context.task), engine_candidate(context.task, context.space.candidate(row))
    if context.problem.workload.shorter_batch(task, candidate, fits / step) is None:
        return None
    text = N_("auto_tuner.control.max_step_time: {seconds:.2g} (steps of fewer micro-batches)")
    return Message(text, seconds=fits)
