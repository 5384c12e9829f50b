"""measure: wait for a trial, stop it when its steps are finished or if it is too slow, and return its outcome.

A trial is stopped early if it has finished at least two steps after the warm-up, and the fastest of them takes
`early_stop_ratio` times as long as the median step of the best trial. Its measurement is stored as partial.

A training trial with too little time for its steps is measured with fewer, at least MIN_STEPS. After its first step, it
is stopped at once if there is no time for a second one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from flagcore.contracts import Platform, RunningLaunch
from flagcore.domain.effects import engine_task
from flagcore.domain.launch import LONGEST_REASON, Exit, failure
from flagcore.domain.search_state import noise
from flagcore.domain.spec import Control, TrainSpec
from flagcore.domain.trial import MIN_STEPS, Measurement, Trial, TrialState, steps_in_time, warmup_steps
from flagcore.errors import FlagError
from flagcore.tuner.stages.readings import Readings, with_readings

EARLY_STOP_RATIO, NOISES = 1.2, 2.0
"""A trial is stopped early if its steps take longer than those of the best by this ratio, and by this multiple of the
noise of the best. Chosen: in 434 pairs of trials on two busy CPU cores, they stop 50% of the slower trials and no
faster one."""
FEW_STEPS = 0.15
"""Half of the relative 80% interval of a step time from a single step; it shrinks with the root of their number, and a
wider spread of the steps counts instead. Chosen."""
POLL_SECONDS = 0.5
ENDED_AFTER_STEPS = (None, "disk", "full_disk", "timeout")
"""Values of `Exit.ended_by` with which a trial counts as measured if its steps are finished."""


def measure(
    running: RunningLaunch,
    platform: Platform,
    trial: Trial,
    folder: str,
    best: Trial | None,
    on_poll: Callable[[], object] = lambda: None,
) -> Trial:
    """Wait for a running trial, and return it with a measurement or the reason of its failure.

    `best` is the best trial so far; None: the trial is not stopped early. `on_poll` is called while the trial runs. On
    an exception such as KeyboardInterrupt, the processes of the trial are ended.
    """
    readings, workload = Readings(platform), platform.workload
    progress = workload.progress(platform.task, folder)
    control, limit, start = platform.task.spec.control, workload.step_limit(platform.task), time.monotonic()
    warmup, wanted = control.warmup_iters, limit
    scale = trial.shortened.low if trial.shortened else 1.0
    faster: Trial | None = None
    stopped = too_long = False
    try:
        while (ended := running.wait(POLL_SECONDS)) is None:
            on_poll()
            steps, elapsed = progress(), time.monotonic() - start
            if limit is not None:
                warmup = warmup_steps(steps, control.warmup_iters)
                wanted = _steps_to_run(steps, limit - control.warmup_iters + warmup, trial, elapsed)
            readings.take(in_steps=len(steps) > warmup)
            stopped = wanted is not None and len(steps) >= wanted
            if not stopped and best and _is_too_slow(steps, warmup, best, scale):
                faster = best
            too_long = not stopped and _is_too_long(steps, platform, trial, elapsed)
            if stopped or faster or too_long:
                ended = running.stop()
                break
    except BaseException:
        running.stop()
        raise
    steps = progress()
    finished = wanted is not None and len(steps) >= wanted and ended.ended_by in ENDED_AFTER_STEPS
    if too_long:
        ended = replace(ended, ended_by="timeout")
    outcome = _outcome(ended, faster, platform, trial, folder, steps, finished=stopped or finished)
    if wanted and outcome.state is TrialState.MEASURED and not stopped:
        outcome = replace(outcome, reason=_end_remark(ended, folder, platform, len(steps), wanted))
    if isinstance(platform.task.spec.work, TrainSpec):
        outcome = _with_fewer_steps(outcome, _comparable(steps, platform), len(steps), control)
    if outcome.measurement:
        outcome = replace(outcome, measurement=with_readings(outcome.measurement, readings, platform))
    else:
        outcome = replace(outcome, telemetry=readings.summary())
    return replace(outcome, duration_s=ended.duration_s, warm=ended.warm)


def _steps_to_run(steps: Sequence[float], planned: int, trial: Trial, elapsed: float) -> int:
    """Return the number of steps after which a trial is stopped: those that end before the target of its time."""
    target = trial.time_limit.target_s if trial.time_limit else None
    if target is None or len(steps) < MIN_STEPS:
        return planned
    return steps_in_time(steps, planned, target - elapsed)


def _is_too_long(steps: Sequence[float], platform: Platform, trial: Trial, elapsed: float) -> bool:
    """Return whether a trial has finished its first step, and the second one would end after its time limit.

    On an accelerator, the first step compiles kernels, so the second one may take only as long as predicted.
    """
    spec = platform.task.spec
    if not isinstance(spec.work, TrainSpec) or len(steps) != 1 or spec.control.train_iters < MIN_STEPS:
        return False
    next_s = steps[0] if platform.support.shared_devices else min(steps[0], _predicted_step(trial) or 0.0)
    return trial.time_limit is not None and elapsed + next_s > trial.time_limit.seconds


def _comparable(steps: Sequence[float], platform: Platform) -> tuple[float, ...]:
    """Return the steps that take as long as later ones: on an accelerator all but the first."""
    return tuple(steps if platform.support.shared_devices else steps[1:])


def _with_fewer_steps(trial: Trial, steps: Sequence[float], count: int, control: Control) -> Trial:
    """Return a trial that ended after `count` steps with its interval, or with the times of its `steps`."""
    measured, planned, scale = trial.measurement, control.train_iters, trial.scale
    if measured is None:
        return replace(trial, finished_steps_s=tuple(scale * each for each in steps))
    timed = len(measured.step_times_s)
    if trial.state is not TrialState.MEASURED or measured.warmup_steps is None or count >= planned:
        return trial
    if timed >= planned - control.warmup_iters:  # its warm-up ended early
        return trial
    spread = (max(steps) - min(steps)) * scale / measured.step_time_s / 2.0 if steps else 0.0
    share = min(max(FEW_STEPS / math.sqrt(timed), spread), 1.0)
    low, high = measured.low_s or measured.step_time_s, measured.high_s or measured.step_time_s
    reason = _few_steps(count, measured.scaled_from or measured.step_time_s, trial, control)
    return replace(
        trial,
        reason=trial.reason or reason,
        measurement=replace(measured, few_steps=True, low_s=low * (1.0 - share), high_s=high * (1.0 + share)),
    )


def _end_remark(ended: Exit, folder: str, platform: Platform, steps: int, wanted: int) -> str | None:
    """Return a remark if a measured trial ended too early or failed after its steps, else None."""
    if steps < wanted:
        return f"it ended after {steps} of {wanted} steps"
    if ended.code == 0 and ended.ended_by is None:
        return None
    patterns = (*platform.failure_patterns, *platform.workload.failure_patterns())
    return f"it failed after all its steps were measured: {failure(ended, folder, patterns)[1]}"[:LONGEST_REASON]


def _outcome(
    ended: Exit,
    beaten_by: Trial | None,
    platform: Platform,
    trial: Trial,
    folder: str,
    steps: Sequence[float],
    *,
    finished: bool,
) -> Trial:
    is_training = isinstance(platform.task.spec.work, TrainSpec)
    cut_off = ended.ended_by == "timeout" and not finished and is_training and len(steps) >= MIN_STEPS
    if (ended.code == 0 and ended.ended_by is None) or beaten_by or finished or cut_off:
        try:
            partial = cut_off or beaten_by is not None
            measured = platform.workload.read(engine_task(platform.task), trial.candidate, folder, partial=partial)
        except FlagError as error:
            return replace(trial, state=TrialState.FAILED, reason=str(error))
        measured = trial.shortened.scaled(measured) if trial.shortened else measured
        if beaten_by:
            measured = replace(measured, partial=True)
            return replace(
                trial, state=TrialState.STOPPED, reason=_early_stop_reason(measured, beaten_by), measurement=measured
            )
        return _checked(platform, replace(trial, measurement=replace(measured, partial=cut_off)))
    patterns = (*platform.failure_patterns, *platform.workload.failure_patterns())
    state, reason = failure(ended, folder, patterns, trial.time_limit)
    if state is TrialState.TIMED_OUT and is_training:
        reason = _timeout_reason(reason, steps, trial, platform.task.spec.control)
    return replace(trial, state=state, reason=reason, inconclusive=ended.ended_by == "host", lost_host=ended.lost_host)


def _timeout_reason(reason: str, steps: Sequence[float], trial: Trial, control: Control) -> str:
    """Return why a trial ended without a measurement, with its only finished step if it has one."""
    if not steps or trial.time_limit is None:
        return f"no step finished: {reason}"[:LONGEST_REASON]
    line = f"{_few_steps(len(steps), steps[0], trial, control)}; there is no time for a second one"
    return f"{line}: {trial.time_limit.seconds:.0f} s ({trial.time_limit.because})"[:LONGEST_REASON]


def _few_steps(count: int, step_s: float, trial: Trial, control: Control) -> str:
    """Return the number of steps of a trial, and their measured and predicted time."""
    predicted = _predicted_step(trial)
    text = f"{count} of {control.train_iters} steps: {step_s:.3g} s"
    return f"{text}, predicted {predicted:.3g} s" if predicted else text


def _predicted_step(trial: Trial) -> float | None:
    """Return the predicted seconds of a step of a trial, which may be shortened; None if unknown."""
    return trial.predicted_step_s / trial.scale if trial.predicted_step_s else None


def _checked(platform: Platform, trial: Trial) -> Trial:
    """Return a finished trial as measured, or as failed if its measurement is invalid."""
    measured, group = trial.measurement, platform.task.cluster.groups[0]
    assert measured is not None
    checks_ranks = platform.support.shared_devices and isinstance(platform.task.spec.work, TrainSpec)
    budget = group.memory_bytes if checks_ranks else None  # the launcher limits the memory of servers
    if budget and measured.device_used_bytes and measured.device_used_bytes > budget:
        used_bytes = measured.device_used_bytes
        reason = f"one rank used {used_bytes / 2**30:.2f} GiB of a budget of {budget / 2**30:.2f} GiB"
        return replace(trial, state=TrialState.OUT_OF_MEMORY, reason=reason)
    if any(loss is None for loss in measured.losses):
        return replace(trial, state=TrialState.FAILED, reason="the loss is not finite")
    if difference := _difference(trial, measured):
        return replace(trial, state=TrialState.INVALID, reason=difference)
    return replace(trial, state=TrialState.MEASURED)


def _difference(trial: Trial, measured: Measurement) -> str | None:
    """Return a description of the first value with which the engine ran instead of the requested one, or None."""
    batch = (("global_batch_size", trial.shortened.global_batch_size),) if trial.shortened else ()
    for knob, requested in (*trial.candidate.items, *batch):
        actual = measured.effective.get(knob, requested)
        if actual != requested:
            return f"the engine ran with {knob} = {actual} instead of {requested}"[:LONGEST_REASON]
    return None


def _is_too_slow(steps: Sequence[float], warmup: int, best: Trial, scale: float) -> bool:
    timed_steps = steps[warmup:]
    return (
        len(timed_steps) >= 2
        and best.measurement is not None
        and scale * min(timed_steps) > early_stop_ratio(best) * best.measurement.step_time_s
    )


def early_stop_ratio(best: Trial) -> float:
    """Return the ratio of a trial's fastest step to the step of `best` above which the trial is stopped early."""
    return max(EARLY_STOP_RATIO, 1.0 + NOISES * noise([best]))


def _early_stop_reason(partial: Measurement, best: Trial) -> str:
    """Return why a trial was stopped early."""
    assert best.measurement is not None
    fastest, step = min(partial.step_times_s), best.measurement.step_time_s
    return (
        f"slower than the best: its fastest step took {fastest:.4g} s, more than {early_stop_ratio(best):.3g} times "
        f"the {step:.4g} s of trial {best.number}"
    )
