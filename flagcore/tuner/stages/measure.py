"""measure: wait for a trial, stop it when its steps are finished or if it is too slow, and return its outcome.

A trial is stopped early if it has finished at least two steps after the warm-up, and the fastest of them takes
`early_stop_ratio` times as long as the median step of the best trial. Its measurement is stored as partial.

A server's trial program stops its load itself, as soon as its step time is certain to exceed `stop_above_s`.

A training trial with too little time for its steps is measured with fewer, at least MIN_STEPS. After its first step, it
is stopped at once if there is no time for a second one.

`compare` checks that a measured trial has the answers of the baseline.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from flagcore.contracts import Platform, RunningLaunch
from flagcore.domain.chip import MEMORY_IN_USE, SLOW_CORE_RATIO, SLOW_RATIO, slow_devices
from flagcore.domain.knob import ANSWERS
from flagcore.domain.launch import INCONCLUSIVE, LONGEST_REASON, Exit, failure
from flagcore.domain.spec import Control, objective_value
from flagcore.domain.steps import MIN_STEPS, is_step_time, steps_in_time, warmup_steps
from flagcore.domain.trial import Measurement, TimeLimit, Trial, TrialState
from flagcore.errors import FlagError
from flagcore.i18n import N_
from flagcore.tuner.devices import device_readers
from flagcore.tuner.search_state import noise

EARLY_STOP_RATIO, NOISES = 1.2, 2.0
"""A trial is stopped early if its steps take longer than the best trial's by the factor EARLY_STOP_RATIO, or by NOISES
times the relative noise of the best, whichever is larger. Chosen by hand: in 434 pairs of trials on two busy CPU cores,
they stop 50% of the slower trials and no faster one."""
SERVER_MARGIN, SERVER_NOISES = 0.2, 4.0
"""A server is stopped early if its rate is lower than the best trial's by the share SERVER_MARGIN, or by SERVER_NOISES
times the relative noise of the best, whichever is larger. Chosen by hand: its first requests are not its whole load."""
FEW_STEPS = 0.15
"""Half the width of the relative 80% interval of a step time that is measured in a single step. It shrinks with the
square root of the number of steps. If the steps spread more widely, their spread is used instead. Chosen by hand."""
POLL_SECONDS = 0.5
HANG_STEPS, HANG_SECONDS = 20.0, 5.0
"""A trial whose time is over hangs if its last step ended so many of its longest steps, and seconds, ago. Chosen by
hand: logs may show several steps at once."""
ENDED_AFTER_STEPS = (None, "disk", "full_disk", "timeout")
"""The values of `Exit.ended_by` with which a trial still counts as measured if it finished its steps."""
STEPS, SLOWER, TOO_LONG = "steps", "slower", "too long"
"""Why a trial is stopped: it has run its steps, it is slower than the best, or its next step takes too long."""


def measure(
    running: RunningLaunch,
    platform: Platform,
    trial: Trial,
    folder: str,
    best: Trial | None,
    on_poll: Callable[[], object] = lambda: None,
) -> Trial:
    """Wait for a running trial, and return it with a measurement or with the reason for its failure.

    On an exception such as KeyboardInterrupt, the processes of the trial are ended.

    - `best`: the best trial so far. If it is None, the trial is not stopped early.
    - `on_poll`: called repeatedly while the trial runs.
    """
    return _Monitor(platform, trial, folder, best).outcome(running, on_poll)


class _Monitor(NamedTuple):
    """Watches a trial that runs in `folder`, and compares it with the `best` trial so far."""

    platform: Platform
    trial: Trial
    folder: str
    best: Trial | None

    @property
    def control(self) -> Control:
        return self.platform.task.spec.control

    @property
    def has_steps(self) -> bool:
        return self.platform.task.spec.work.has_steps

    def outcome(self, running: RunningLaunch, on_poll: Callable[[], object]) -> Trial:
        """Wait until the trial ends, or stop it, and return it with its outcome."""
        readings, running_steps = Readings(self.platform), self.platform.engine.steps(self.platform.task, self.folder)
        step_limit = running_steps.limit
        start, warmup, steps_to_run = time.monotonic(), self.control.warmup_iters, step_limit
        step_count, last_step_at, why = 0, 0.0, ""

        def progress() -> tuple[float, ...]:
            """Return the step times so far. Those that cannot be are infinite; the trial fails at its end."""
            return tuple(each if is_step_time(each) else math.inf for each in running_steps.times())

        try:
            while (ended := running.wait(POLL_SECONDS)) is None:
                on_poll()
                steps, elapsed = progress(), time.monotonic() - start
                if len(steps) > step_count:
                    step_count, last_step_at = len(steps), elapsed
                if step_limit is not None:
                    # The warm-up may end early, if step times are steady. The number of timed steps stays the same.
                    warmup = warmup_steps(steps, self.control.warmup_iters)
                    steps_to_run = self._steps_to_run(steps, step_limit - self.control.warmup_iters + warmup, elapsed)
                readings.take()
                if why := self._why_stop(steps, warmup, steps_to_run, elapsed):
                    ended = running.stop()
                    break
        except BaseException:
            running.stop()
            raise
        steps = progress()
        # The trial may also have finished its steps, and ended by itself, after the last poll.
        has_ended = steps_to_run is not None and len(steps) >= steps_to_run and ended.ended_by in ENDED_AFTER_STEPS
        if why == TOO_LONG:
            ended = replace(ended, ended_by="timeout")
        trial = self._stopped_early() if why == SLOWER else self._ended(ended, steps, why == STEPS or has_ended)
        if why != STEPS:
            trial = self._with_end_remark(trial, ended, len(steps), steps_to_run)
        if self.has_steps:
            trial = self._with_hang(trial, ended, steps, time.monotonic() - start - last_step_at)
            trial = self._with_fewer_steps(trial, steps)
        if trial.measurement:
            trial = replace(trial, measurement=with_readings(trial.measurement, readings, self.platform))
        else:
            trial = replace(trial, telemetry=readings.summary())
        return replace(trial, duration_s=ended.duration_s, warm=ended.warm)

    def _why_stop(self, steps: Sequence[float], warmup: int, steps_to_run: int | None, elapsed: float) -> str:
        """Return why a trial is stopped: STEPS, SLOWER or TOO_LONG. Empty if it runs on."""
        if steps_to_run is not None and len(steps) >= steps_to_run:
            return STEPS
        if self._is_slower_than_best(steps[warmup:]):
            return SLOWER
        return TOO_LONG if self._is_too_long(steps, elapsed) else ""

    def _steps_to_run(self, steps: Sequence[float], max_steps: int, elapsed: float) -> int:
        """Return the number of finished steps at which the trial is stopped.

        It is `max_steps`, or the number of steps that end before the trial's target time.
        """
        target = self.trial.time_limit.target_s if self.trial.time_limit else None
        if target is None or len(steps) < MIN_STEPS:
            return max_steps
        return steps_in_time(steps, max_steps, target - elapsed)

    def _is_slower_than_best(self, timed_steps: Sequence[float]) -> bool:
        if len(timed_steps) < 2 or self.best is None or self.best.measurement is None:
            return False
        scale = self.trial.shortened.low if self.trial.shortened else 1.0
        return scale * min(timed_steps) > early_stop_ratio(self.best) * self.best.measurement.step_time_s

    def _is_too_long(self, steps: Sequence[float], elapsed: float) -> bool:
        """Return whether only the first step is finished, and the second one is expected to end after the time limit.

        On an accelerator, the first step compiles kernels, so the second one is assumed to take at most the predicted
        time.
        """
        limit = self.trial.time_limit
        has_one_step = self.has_steps and len(steps) == 1 and steps[0] < math.inf
        if not has_one_step or self.control.train_iters < MIN_STEPS or limit is None:
            return False
        is_shared = self.platform.support.shared_devices
        return elapsed + (steps[0] if is_shared else min(steps[0], _predicted_step(self.trial) or 0.0)) > limit.seconds

    def _measurement(self, *, partial: bool) -> Measurement:
        """Read the measurement, and scale it to whole steps if the steps were shortened. Raises FlagError."""
        task, trial = self.platform.task.for_engine(), self.trial
        measured = self.platform.engine.read(task, trial.candidate, self.folder, partial=partial)
        partial = partial or measured.partial
        return replace(trial.shortened.scaled(measured) if trial.shortened else measured, partial=partial)

    def _failed(self, error: FlagError) -> Trial:
        return replace(self.trial, state=TrialState.FAILED, reason=str(error))

    def _stopped_early(self) -> Trial:
        """Return the trial as stopped, with its partial measurement."""
        assert self.best is not None
        assert self.best.measurement is not None
        try:
            partial = self._measurement(partial=True)
        except FlagError as error:
            return self._failed(error)
        reason = (
            f"slower than the best: its fastest step took {min(partial.step_times_s):.4g} s, more than "
            f"{early_stop_ratio(self.best):.3g} times the {self.best.measurement.step_time_s:.4g} s of trial "
            f"{self.best.number}"
        )
        return replace(self.trial, state=TrialState.STOPPED, reason=reason, measurement=partial)

    def _ended(self, ended: Exit, steps: Sequence[float], has_all_steps: bool) -> Trial:
        """Return the trial as measured if it ran long enough, or with the reason for its failure."""
        cut_off = ended.ended_by == "timeout" and not has_all_steps and self.has_steps and len(steps) >= MIN_STEPS
        late = ended.ended_by == "timeout" and not self.has_steps  # a trial may have measured, and been slow to stop
        if (ended.code == 0 and ended.ended_by is None) or has_all_steps or cut_off or late:
            try:
                return self._checked(self._measurement(partial=cut_off))
            except FlagError as error:
                if not late:
                    return self._failed(error)
        state, reason = self._failure(ended, self.trial.time_limit)
        if state is TrialState.TIMED_OUT and self.has_steps:
            reason = self._timeout_reason(reason, steps)
        is_inconclusive = ended.ended_by in INCONCLUSIVE
        return replace(self.trial, state=state, reason=reason, inconclusive=is_inconclusive, lost_host=ended.lost_host)

    def _failure(self, ended: Exit, limit: TimeLimit | None = None) -> tuple[TrialState, str]:
        patterns = (*self.platform.failure_patterns, *self.platform.engine.failures)
        return failure(ended, self.folder, patterns, self.platform.task.spec.secrets, limit)

    def _checked(self, measured: Measurement) -> Trial:
        """Return the trial as measured, or as failed if its measurement is invalid."""
        group, trial = self.platform.task.cluster.groups[0], replace(self.trial, measurement=measured)
        checks_ranks = self.platform.support.shared_devices and self.has_steps
        budget = group.memory_bytes if checks_ranks else None  # servers need no check: the launcher limits their memory
        if budget and measured.device_used_bytes and measured.device_used_bytes > budget:
            used_bytes = measured.device_used_bytes
            reason = f"one rank used {used_bytes / 2**30:.2f} GiB of a budget of {budget / 2**30:.2f} GiB"
            return replace(trial, state=TrialState.OUT_OF_MEMORY, reason=reason)
        if any(loss is None for loss in measured.losses):
            return replace(trial, state=TrialState.FAILED, reason=N_("the loss is not finite"))
        batch = (("global_batch_size", trial.shortened.global_batch_size),) if trial.shortened else ()
        for knob, requested in (*trial.candidate.items, *batch):
            if (actual := measured.effective.get(knob, requested)) != requested:
                reason = f"the engine ran with {knob} = {actual} instead of {requested}"[:LONGEST_REASON]
                return replace(trial, state=TrialState.INVALID, reason=reason)
        if measured.partial and not self.has_steps and self.best is not None:
            best, name = self.best, self.platform.task.spec.objective
            rate = objective_value(name, best.measurement.step_time_s) if best.measurement else math.nan
            reason = (
                f"slower than the best: {name} was {objective_value(name, measured.step_time_s):.4g} when its load was "
                f"stopped, {rate:.4g} in trial {best.number}"
            )
            return replace(trial, state=TrialState.STOPPED, reason=reason)
        return replace(trial, state=TrialState.MEASURED)

    def _with_end_remark(self, trial: Trial, ended: Exit, steps: int, steps_to_run: int | None) -> Trial:
        """Return `trial` with a remark if it was measured, but ended too early, or failed after its steps."""
        if not steps_to_run or trial.state is not TrialState.MEASURED:
            return trial
        if steps < steps_to_run:
            return replace(trial, reason=f"it ended after {steps} of {steps_to_run} steps")
        if ended.code == 0 and ended.ended_by is None:
            return replace(trial, reason=None)
        reason = f"it failed after all its steps were measured: {self._failure(ended)[1]}"
        return replace(trial, reason=reason[:LONGEST_REASON])

    def _with_fewer_steps(self, outcome: Trial, steps: Sequence[float]) -> Trial:
        """Return `outcome` with the information from the steps, if they are fewer than planned.

        A measured trial gets a wider interval and a reason. A trial without a measurement gets the times of its
        finished steps.
        """
        measured, planned, count = outcome.measurement, self.control.train_iters, len(steps)
        # On an accelerator, the first step takes longer than later ones: it compiles kernels.
        steps = [each for each in steps[not self.platform.support.shared_devices :] if each < math.inf]
        if measured is None:
            return replace(outcome, finished_steps_s=tuple(outcome.scale * each for each in steps))
        timed = len(measured.step_times_s)
        if outcome.state is not TrialState.MEASURED or measured.warmup_steps is None or count >= planned:
            return outcome
        if timed >= planned - self.control.warmup_iters:  # all timed steps ran, because the warm-up ended early
            return outcome
        spread = (max(steps) - min(steps)) * outcome.scale / measured.step_time_s / 2.0 if steps else 0.0
        share = min(max(FEW_STEPS / math.sqrt(timed), spread), 1.0)
        low, high = measured.low_s or measured.step_time_s, measured.high_s or measured.step_time_s
        return replace(
            outcome,
            reason=outcome.reason or self._few_steps(count, measured.scaled_from or measured.step_time_s),
            measurement=replace(measured, few_steps=True, low_s=low * (1.0 - share), high_s=high * (1.0 + share)),
        )

    def _timeout_reason(self, reason: str, steps: Sequence[float]) -> str:
        """Return why the trial ended without a measurement, with the time of its only finished step if it has one."""
        limit = self.trial.time_limit
        if not steps or limit is None:
            return f"no step finished: {reason}"[:LONGEST_REASON]
        line = f"{self._few_steps(len(steps), steps[0])}; there is no time for a second one"
        return f"{line}: {limit.seconds:.0f} s ({limit.because})"[:LONGEST_REASON]

    def _with_hang(self, trial: Trial, ended: Exit, steps: Sequence[float], silent_s: float) -> Trial:
        """Return `trial` with the reason that it hung, if its time is over long after its last step."""
        if ended.ended_by != "timeout" or silent_s <= max(HANG_STEPS * max(steps, default=math.inf), HANG_SECONDS):
            return trial
        limit = self.trial.time_limit
        line = f"{self._few_steps(len(steps), max(steps))}; the next one did not end"
        reason = f"{line} within {limit.seconds:.0f} s ({limit.because})"[:LONGEST_REASON] if limit else line
        return replace(trial, silent_s=silent_s, reason=reason)

    def _few_steps(self, count: int, step_s: float) -> str:
        """Return a phrase with the number of finished steps `count`, and their measured and predicted time."""
        predicted = _predicted_step(self.trial)
        seconds = f"{step_s:.3g} s" if step_s < math.inf else "an unusable step time"
        text = f"{count} of {self.control.train_iters} steps: {seconds}"
        return f"{text}, predicted {predicted:.3g} s" if predicted else text


def _predicted_step(trial: Trial) -> float | None:
    """Return the predicted time of a step as the trial runs it, maybe shortened, in seconds, or None if unknown."""
    return trial.predicted_step_s / trial.scale if trial.predicted_step_s else None


def early_stop_ratio(best: Trial) -> float:
    """Return the ratio above which a trial is stopped early. It is compared with the trial's fastest step time, divided
    by the step time of `best`."""
    return max(EARLY_STOP_RATIO, 1.0 + NOISES * noise([best]))


def stop_above_s(best: Trial | None) -> float | None:
    """Return the step time above which a server may be stopped early, or None if it may not."""
    if best is None or best.measurement is None:
        return None
    share = 1.0 - max(SERVER_MARGIN, SERVER_NOISES * noise([best]))
    return best.measurement.step_time_s / share if share > 0.0 else None


LOG = logging.getLogger("flagcore")
POWER_LIMIT = "power_limit_watts"
"""The name of the power limit in telemetry. It is a setting, so no peak is reported for it."""
MAX_SHARE_BEFORE = 0.1
"""The memory in use is unknown if other programs used more than this share of its peak before the trial."""


class Readings:
    """Collects telemetry of a trial's devices about once per second, and returns its means and peaks."""

    def __init__(self, platform: Platform) -> None:
        self._readers = {number: reader for number, _, reader in device_readers(platform)}
        self._samples: dict[int, dict[str, list[float]]] = {}
        self._next_time = 0.0
        self._used_before = math.inf
        """The memory in use on the fullest device at the first reading."""

    def take(self) -> None:
        """Read all devices, at most once per second. A reader that raises is not called again."""
        if time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + 1.0
        for number, reader in list(self._readers.items()):
            try:
                for name, value in reader.sample().items():
                    if math.isfinite(value):
                        self._samples.setdefault(number, {}).setdefault(name, []).append(float(value))
            except Exception as error:
                LOG.warning("telemetry of device %s is disabled: %s", number, error)
                del self._readers[number]
        if math.isinf(self._used_before):
            self._used_before = max(self._memory(), default=math.inf)

    def memory_used(self) -> int | None:
        """Return the memory in use on the fullest device, in bytes.

        Returns None if there are no readings, or if other programs used much of the memory before the trial.
        """
        readings = self._memory()
        if not readings or self._used_before > MAX_SHARE_BEFORE * max(readings):
            return None
        return int(max(readings))

    def _memory(self) -> list[float]:
        return [value for samples in self._samples.values() for value in samples.get(MEMORY_IN_USE, [])]

    def summary(self) -> dict[str, float]:
        """Return the means over all devices by name, and the peaks with the prefix `peak_`."""
        values_by_name: dict[str, list[float]] = {}
        for samples in self._samples.values():
            for name, values in samples.items():
                values_by_name.setdefault(name, []).extend(values)
        return _means_and_peaks(values_by_name)

    def by_device(self) -> dict[int, dict[str, float]]:
        """Return the means and peaks of each device. The key is the number of the device in the whole cluster."""
        return {number: _means_and_peaks(samples) for number, samples in self._samples.items()}


def _means_and_peaks(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    means = {name: statistics.fmean(values) for name, values in samples.items()}
    return means | {f"peak_{name}": max(values) for name, values in samples.items() if name != POWER_LIMIT}


def with_readings(measured: Measurement, readings: Readings, platform: Platform) -> Measurement:
    """Return a measurement with the telemetry of its devices, and with the slow devices.

    The memory in use comes from telemetry only if the trial did not report it.
    """
    by_device = {int(each["device"]): dict(each) for each in measured.devices}
    if not platform.support.shared_devices:  # on shared devices, readings are of the whole machine
        for number, figures in readings.by_device().items():
            by_device[number] = {"device": number, **by_device.get(number, {}), **figures}
    devices = tuple(by_device[number] for number in sorted(by_device))
    slow_ratio = SLOW_CORE_RATIO if platform.support.shared_devices else SLOW_RATIO
    slow = tuple(
        line for each in _of_groups(devices, platform) for line in slow_devices(*each[:2], slow_ratio, each[2])
    )
    used_bytes = None if platform.support.shared_devices else readings.memory_used()
    if measured.device_used_bytes is not None:
        used_bytes = measured.device_used_bytes
    return replace(measured, telemetry=readings.summary(), device_used_bytes=used_bytes, devices=devices, slow=slow)


def _of_groups(
    devices: Sequence[Mapping[str, float]], platform: Platform
) -> Iterator[tuple[Sequence[Mapping[str, float]], int, Sequence[str]]]:
    """Yield, for each node group, its devices (numbered from 0), the number of devices per node, and its hosts."""
    groups, hosts = platform.task.cluster.groups, platform.task.spec.cluster.hosts
    if len(groups) == 1:
        yield devices, groups[0].devices_per_node, hosts
        return
    for group in groups:
        group_devices = [each for each in devices if each["device"] < group.devices]
        yield group_devices, group.devices_per_node, hosts[: group.nodes]
        devices = [{**each, "device": each["device"] - group.devices} for each in devices[len(group_devices) :]]
        hosts = hosts[group.nodes :]


def compare(platform: Platform, trial: Trial, baseline: Trial, folders: tuple[str, str]) -> Trial:
    """Return a measured trial with the difference of its answers to the baseline's, or as invalid if it is too large.

    `folders`: of both. Nothing is compared if the baseline was not measured, or steps of both have other samples.
    """
    cuts = {each.shortened and (each.shortened.global_batch_size, each.fewer_nodes) for each in (trial, baseline)}
    changed = {name for name, _value in {*trial.candidate.items} ^ {*baseline.candidate.items}}
    is_measured = trial.state is baseline.state is TrialState.MEASURED
    if not (is_measured and changed and trial.measurement) or len(cuts) > 1:
        return trial
    knobs = {each.name: each.answers for each in (*platform.engine.knobs, *platform.knobs)}
    change = max((knobs.get(name, ANSWERS[1]) for name in changed), key=ANSWERS.index)
    try:
        found = platform.engine.answers(platform.task.for_engine(), change, *folders)
    except FlagError as error:
        return replace(trial, state=TrialState.INVALID, reason=str(error))
    trial = replace(trial, measurement=replace(trial.measurement, answers=found))
    if found is None or found.difference <= found.limit:
        return trial
    return replace(trial, state=TrialState.INVALID, reason=f"other answers than the baseline: {found.text}")
