"""readings: the telemetry of a trial's devices while it runs, and what it adds to a measurement."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from flagcore.contracts import Platform, Telemetry
from flagcore.domain.chip import MEMORY_IN_USE, SLOW_CORE_RATIO, SLOW_RATIO, slow_devices
from flagcore.domain.serving import PER_DEVICE
from flagcore.domain.trial import Measurement

LOG = logging.getLogger("flagcore")
POWER, STEP_POWER, JOULES = "power_watts", "step_power_watts", "joules_per_output_token"
"""The names of the power of a device in telemetry, of its power after the warm-up steps, and of a figure of a load."""
POWER_LIMIT = "power_limit_watts"
"""The name of the power limit in telemetry. It is a setting, for which no peak is reported."""
MAX_SHARE_BEFORE = 0.1
"""Readings of the memory in use are ignored if other programs used more than this share of it before the trial."""


class Readings:
    """Collects telemetry about once per second, and returns means and peaks of all devices and of each."""

    def __init__(self, platform: Platform) -> None:
        self._groups = groups = platform.task.cluster.groups
        counts = {host: groups[index].devices_per_node for host, index in platform.group_of_hosts.items()}
        starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        self._readers: list[tuple[int, Telemetry]] = [
            (starts.get(host, 0) + place, platform.telemetry[device])
            for host in dict.fromkeys(device.host for device in platform.devices)
            for place, device in enumerate(platform.devices_of(host))
            if device in platform.telemetry
        ]
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


def with_readings(measured: Measurement, readings: Readings, platform: Platform) -> Measurement:
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


def _energy(measured: Measurement, readings: Readings) -> dict[str, float]:
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
