"""measure: wait for a trial, stop it when its steps are finished or if it is too slow, and return its outcome.

A trial is stopped early if it has finished at least two steps after the warm-up, and the fastest of them takes
`early_stop_ratio` times as long as the median step of the best trial. Its measurement is stored as partial.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flagcore.contracts import Platform, RunningLaunch, Telemetry, Workload, step_limit
from flagcore.domain.devices import MEMORY_IN_USE, SLOW_CORE_RATIO, SLOW_RATIO, slow_devices
from flagcore.domain.effects import engine_task
from flagcore.domain.launch import LONGEST_REASON, Exit, failure
from flagcore.domain.search_state import noise
from flagcore.domain.spec import TrainSpec
from flagcore.domain.trial import Measurement, Trial, TrialState
from flagcore.errors import FlagError

LOG = logging.getLogger("flagcore")
EARLY_STOP_RATIO, NOISES = 1.2, 2.0
"""A trial is stopped early if its steps take longer than those of the best by this ratio, and by this multiple of the
noise of the best. Chosen: in 434 pairs of trials on two busy CPU cores, they stop 50% of the slower trials and no
faster one."""
POLL_SECONDS = 0.5
ENDED_AFTER_STEPS = (None, "disk", "full_disk", "timeout")
"""Values of `Exit.ended_by` with which a trial counts as measured if its steps are finished."""
POWER, STEP_POWER = "power_watts", "step_power_watts"
"""The names of the power of a device in telemetry, and of its power after the warm-up steps."""
POWER_LIMIT = "power_limit_watts"
"""The name of the power limit in telemetry. It is a setting, for which no peak is reported."""
MAX_SHARE_BEFORE = 0.1
"""Readings of the memory in use are ignored if other programs used more than this share of it before the trial."""


def measure(
    running: RunningLaunch, platform: Platform, workload: Workload, trial: Trial, folder: str, best: Trial | None
) -> Trial:
    """Wait for a running trial, and return it with a measurement or the reason of its failure.

    `best` is the best trial so far; None: the trial is not stopped early. On an exception such as KeyboardInterrupt,
    the processes of the trial are ended.
    """
    readings, progress = _Readings(platform), workload.progress(platform.task, folder)
    warmup, wanted = platform.task.spec.control.warmup_iters, step_limit(workload, platform.task)
    scale = trial.shortened.low if trial.shortened else 1.0
    faster: Trial | None = None
    stopped = False
    try:
        while (ended := running.wait(POLL_SECONDS)) is None:
            steps = progress()
            readings.take(in_steps=len(steps) > warmup)
            stopped = wanted is not None and len(steps) >= wanted
            if not stopped and best and _is_too_slow(steps, warmup, best, scale):
                faster = best
            if stopped or faster:
                ended = running.stop()
                break
    except BaseException:
        running.stop()
        raise
    finished = wanted is not None and len(progress()) >= wanted and ended.ended_by in ENDED_AFTER_STEPS
    outcome = _outcome(ended, faster, platform, workload, trial, folder, finished=stopped or finished)
    if wanted and outcome.state is TrialState.MEASURED and not stopped:
        outcome = replace(outcome, reason=_end_remark(ended, folder, platform, workload, len(progress()), wanted))
    if outcome.measurement:
        outcome = replace(outcome, measurement=_with_readings(outcome.measurement, readings, platform))
    return replace(outcome, duration_s=ended.duration_s, warm=ended.warm)


def _with_readings(measured: Measurement, readings: _Readings, platform: Platform) -> Measurement:
    """Return a measurement with the telemetry of its devices, and the slow devices.

    The memory in use is from the telemetry if the trial did not report it.
    """
    by_device = {int(each["device"]): dict(each) for each in measured.devices}
    if not platform.support.shared_devices:  # otherwise readings are of the whole machine
        for number, figures in readings.by_device().items():
            by_device[number] = {"device": number, **by_device.get(number, {}), **figures}
    devices = tuple(by_device[number] for number in sorted(by_device))
    slow_ratio = SLOW_CORE_RATIO if platform.support.shared_devices else SLOW_RATIO
    per_node, hosts = platform.task.cluster.groups[0].devices_per_node, platform.task.spec.cluster.hosts
    slow = slow_devices(devices, per_node, slow_ratio, hosts)
    used_bytes = None if platform.support.shared_devices else readings.memory_used()
    if measured.device_used_bytes is not None:
        used_bytes = measured.device_used_bytes
    return replace(measured, telemetry=readings.summary(), device_used_bytes=used_bytes, devices=devices, slow=slow)


def _end_remark(
    ended: Exit, folder: str, platform: Platform, workload: Workload, steps: int, wanted: int
) -> str | None:
    """Return a remark if a measured trial ended too early or failed after its steps, else None."""
    if steps < wanted:
        return f"it ended after {steps} of {wanted} steps"
    if ended.code == 0 and ended.ended_by is None:
        return None
    patterns = (*platform.failure_patterns, *workload.failure_patterns())
    return f"it failed after all its steps were measured: {failure(ended, folder, patterns)[1]}"[:LONGEST_REASON]


def _outcome(
    ended: Exit,
    beaten_by: Trial | None,
    platform: Platform,
    workload: Workload,
    trial: Trial,
    folder: str,
    *,
    finished: bool,
) -> Trial:
    if (ended.code == 0 and ended.ended_by is None) or beaten_by or finished:
        try:
            measured = workload.read(engine_task(platform.task), trial.candidate, folder, partial=beaten_by is not None)
        except FlagError as error:
            return replace(trial, state=TrialState.FAILED, reason=str(error))
        measured = trial.shortened.scaled(measured) if trial.shortened else measured
        if beaten_by:
            partial = replace(measured, partial=True)
            return replace(
                trial, state=TrialState.STOPPED, reason=_early_stop_reason(partial, beaten_by), measurement=partial
            )
        return _checked(platform, replace(trial, measurement=measured))
    patterns = (*platform.failure_patterns, *workload.failure_patterns())
    state, reason = failure(ended, folder, patterns, trial.time_limit)
    return replace(trial, state=state, reason=reason, inconclusive=ended.ended_by == "host", lost_host=ended.lost_host)


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


class _Readings:
    """Collects telemetry about once per second, and returns means and peaks of all devices and of each."""

    def __init__(self, platform: Platform) -> None:
        task = platform.task
        hosts, per_node = task.spec.cluster.hosts, task.cluster.groups[0].devices_per_node
        self._readers: list[tuple[int, Telemetry]] = [
            (device.index + (hosts.index(device.host) * per_node if device.host else 0), reader)
            for device, reader in zip(platform.read_devices, platform.telemetry, strict=True)
            if not device.host or device.index < per_node
        ]
        if (names := platform.selected_devices) is not None:
            named = [(str(number), reader) for number, reader in self._readers]
            self._readers = [(names.index(name), reader) for name, reader in named if name in names]
        self._samples: dict[int, dict[str, list[float]]] = {}
        self._next_time = 0.0
        self._used_before = math.inf
        """The maximum memory in use of a device at the first reading."""

    def take(self, *, in_steps: bool) -> None:
        """Read all devices, at most once per second. A reader that raises is not called again.

        With `in_steps`, power counts as that of measured steps.
        """
        if time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + 1.0
        for number, reader in list(self._readers):
            try:
                for name, value in reader.sample().items():
                    if math.isfinite(value):
                        names = (name, STEP_POWER) if name == POWER and in_steps else (name,)
                        for each in names:
                            self._samples.setdefault(number, {}).setdefault(each, []).append(float(value))
            except Exception as error:
                LOG.warning("telemetry of device %s is disabled: %s", number, error)
                self._readers.remove((number, reader))
        if math.isinf(self._used_before):
            self._used_before = max(self._memory(), default=math.inf)

    def memory_used(self) -> int | None:
        """Return the maximum memory in use of a device; None without readings, or if other programs used much of it."""
        readings = self._memory()
        if not readings or self._used_before > MAX_SHARE_BEFORE * max(readings):
            return None
        return int(max(readings))

    def _memory(self) -> list[float]:
        return [value for samples in self._samples.values() for value in samples.get(MEMORY_IN_USE, [])]

    def summary(self) -> dict[str, float]:
        """Return the means by name, and the peaks with the prefix `peak_`, over all devices."""
        values_by_name: dict[str, list[float]] = {}
        for samples in self._samples.values():
            for name, values in samples.items():
                values_by_name.setdefault(name, []).extend(values)
        return _means_and_peaks(values_by_name)

    def by_device(self) -> dict[int, dict[str, float]]:
        """Return the means and peaks of each device by its number over all nodes."""
        return {number: _means_and_peaks(samples) for number, samples in self._samples.items()}


def _means_and_peaks(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    means = {name: statistics.fmean(values) for name, values in samples.items()}
    return means | {f"peak_{name}": max(values) for name, values in samples.items() if name != POWER_LIMIT}
