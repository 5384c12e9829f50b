"""measure: wait for a trial, stop it when its steps are finished or if it is too slow, and return its outcome.

A trial is stopped early if it has finished at least two steps after the warm-up, and the fastest of them takes
`early_stop_ratio` times as long as the median step of the best trial. Its measurement is stored as partial.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from flagcore.contracts import Platform, RunningLaunch, Telemetry, Workload, step_limit
from flagcore.domain.devices import MEMORY_IN_USE, SLOW_CORE_RATIO, SLOW_RATIO, slow_devices
from flagcore.domain.effects import engine_task
from flagcore.domain.launch import LONGEST_REASON, Exit, failure
from flagcore.domain.search_state import noise
from flagcore.domain.serving import PER_DEVICE
from flagcore.domain.spec import TrainSpec
from flagcore.domain.trial import Measurement, Trial, TrialState
from flagcore.domain.warmup import warmup_steps
from flagcore.errors import FlagError

LOG = logging.getLogger("flagcore")
EARLY_STOP_RATIO, NOISES = 1.2, 2.0
"""A trial is stopped early if its steps take longer than those of the best by this ratio, and by this multiple of the
noise of the best. Chosen: in 434 pairs of trials on two busy CPU cores, they stop 50% of the slower trials and no
faster one."""
POLL_SECONDS = 0.5
ENDED_AFTER_STEPS = (None, "disk", "full_disk", "timeout")
"""Values of `Exit.ended_by` with which a trial counts as measured if its steps are finished."""
POWER, STEP_POWER, JOULES = "power_watts", "step_power_watts", "joules_per_output_token"
"""The names of the power of a device in telemetry, of its power after the warm-up steps, and of a figure of a load."""
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
    most_warmup, limit = platform.task.spec.control.warmup_iters, step_limit(workload, platform.task)
    warmup, wanted = most_warmup, limit
    scale = trial.shortened.low if trial.shortened else 1.0
    faster: Trial | None = None
    stopped = False
    try:
        while (ended := running.wait(POLL_SECONDS)) is None:
            steps = progress()
            if limit is not None:
                warmup = warmup_steps(steps, most_warmup)
                wanted = limit - most_warmup + warmup
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
    slow = tuple(
        line for each in _of_groups(devices, platform) for line in slow_devices(*each[:2], slow_ratio, each[2])
    )
    used_bytes = None if platform.support.shared_devices else readings.memory_used()
    if measured.device_used_bytes is not None:
        used_bytes = measured.device_used_bytes
    return replace(
        measured,
        telemetry=readings.summary(),
        device_used_bytes=used_bytes,
        devices=devices,
        slow=slow,
        figures={**measured.figures, **_energy(measured, readings)},
        windows=(),
    )


def _energy(measured: Measurement, readings: _Readings) -> dict[str, float]:
    """Return the joules per output token of a load; nothing if the power of one of its devices is unknown."""
    rate, per_device = measured.figures.get("output_tokens_per_s"), measured.figures.get(PER_DEVICE)
    if not rate or not per_device:
        return {}
    watts = [readings.watts(device, measured.windows) for device in range(round(rate / per_device))]
    known = [each for each in watts if each is not None]
    return {JOULES: sum(known) / rate} if len(known) == len(watts) else {}


def _of_groups(
    devices: Sequence[Mapping[str, float]], platform: Platform
) -> Iterator[tuple[Sequence[Mapping[str, float]], int, Sequence[str]]]:
    """Yield the devices of each node group, numbered from 0, the number of a node, and the hosts of the group."""
    groups, hosts = platform.task.cluster.groups, platform.task.spec.cluster.hosts
    if len(groups) == 1:
        yield devices, groups[0].devices_per_node, hosts
        return
    for group in groups:
        own = [each for each in devices if each["device"] < group.devices]
        yield own, group.devices_per_node, hosts[: group.nodes]
        devices = [{**each, "device": each["device"] - group.devices} for each in devices[len(own) :]]
        hosts = hosts[group.nodes :]


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
        self._groups = groups = platform.task.cluster.groups
        counts = {host: groups[index].devices_per_node for host, index in platform.group_of_hosts.items()}
        starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        self._readers: list[tuple[int, Telemetry]] = [
            (device.index + starts.get(device.host, 0), reader)
            for device, reader in zip(platform.read_devices, platform.telemetry, strict=True)
            if not device.host or device.index < counts[device.host]
        ]
        if (names := platform.selected_devices) is not None:
            named = [(str(number), reader) for number, reader in self._readers]
            self._readers = [(names.index(name), reader) for name, reader in named if name in names]
        self._samples: dict[int, dict[str, list[float]]] = {}
        self._power: dict[int, list[tuple[float, float]]] = {}
        """Times and readings of the power of each device."""
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
                        if name == POWER:
                            self._power.setdefault(number, []).append((self._next_time - 1.0, float(value)))
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

    def watts(self, device: int, windows: Sequence[tuple[float, float]]) -> float | None:
        """Return the mean power of a device in `windows`, None without readings."""
        readings = self._power.get(device, ())
        inside = [watts for at, watts in readings if any(start <= at <= end for start, end in windows)]
        return statistics.fmean(inside) if inside else None

    def _memory(self) -> list[float]:
        return [value for samples in self._samples.values() for value in samples.get(MEMORY_IN_USE, [])]

    def summary(self) -> dict[str, float]:
        """Return the means by name, and the peaks with the prefix `peak_`, over all devices. With several node groups,
        the power of measured steps is the mean of a device of all groups, and is left out if a group has no readings.
        """
        values_by_name: dict[str, list[float]] = {}
        for samples in self._samples.values():
            for name, values in samples.items():
                values_by_name.setdefault(name, []).extend(values)
        found: dict[str, float | None] = {**_means_and_peaks(values_by_name)}
        if len(self._groups) > 1 and STEP_POWER in found:
            found |= {STEP_POWER: self._mean_step_watts()}
        return {name: value for name, value in found.items() if value is not None}

    def _mean_step_watts(self) -> float | None:
        """Return the mean power of a device in measured steps, None if a node group has no readings."""
        total, first = 0.0, 0
        for group in self._groups:
            own = range(first, first + group.devices)
            values = [value for number in own for value in self._samples.get(number, {}).get(STEP_POWER, ())]
            if not values:
                return None
            total, first = total + statistics.fmean(values) * group.devices, first + group.devices
        return total / first

    def by_device(self) -> dict[int, dict[str, float]]:
        """Return the means and peaks of each device by its number over all nodes."""
        return {number: _means_and_peaks(samples) for number, samples in self._samples.items()}


def _means_and_peaks(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    means = {name: statistics.fmean(values) for name, values in samples.items()}
    return means | {f"peak_{name}": max(values) for name, values in samples.items() if name != POWER_LIMIT}
