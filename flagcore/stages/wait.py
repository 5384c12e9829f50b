"""wait: wait for the devices of a trial to become free, for a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import nan

import numpy as np

from flagcore.contracts import Platform, Telemetry, device_use
from flagcore.domain.chip import Device
from flagcore.domain.devices import MEMORY_IN_USE, DeviceUse
from flagcore.domain.serving import ServeSpec
from flagcore.errors import NoDevice

FREE_SHARE = 0.95
"""A device counts as free if at least this share of a trial's memory budget is free, because displays use up to a few
percent. Chosen. It is also free if only as much is in use as the memory model expects without tensors, because the
drivers of some chips use more."""

POLL_SECONDS = 2.0
SETTLE_SECONDS = 5.0
"""The time that a driver may need to free the memory of a process that has ended."""

MAX_PROCESSES = 3
"""The maximum number of processes that are named for a device."""

GIB = 2**30


def wait_for_devices(
    platform: Platform,
    need_bytes: float,
    seconds: float,
    on_wait: Callable[[str], object] = lambda busy: None,
    pause: Callable[[float], object] = time.sleep,
) -> str:
    """Wait at most `seconds` until the devices of a trial are free. Return why they are not free then, empty if free.

    `need_bytes` is the memory that the trial needs if devices share the memory of the machine. `on_wait` is called once
    if the trial has to wait, `pause` to sleep for some seconds. Devices without readings count as free.
    """
    deadline, has_waited = time.monotonic() + seconds, False
    while busy := "; ".join(_busy_devices(platform, need_bytes)):
        left = deadline - time.monotonic()
        if left <= 0:
            return busy
        if not has_waited:
            on_wait(busy)
        has_waited = True
        pause(min(POLL_SECONDS, left))
    return ""


def _busy_devices(platform: Platform, need_bytes: float) -> Iterator[str]:
    """Yield a line for each device that a trial cannot use."""
    trial_devices = _trial_devices(platform)
    if platform.support.shared_devices:
        of_hosts = {
            device.host: reader for device, reader in reversed(trial_devices)
        }  # a reader reads the whole machine
        for host, reader in of_hosts.items():
            free = _use(reader).free_bytes
            if free is not None and free < need_bytes:
                place = f" on {host}" if host else ""
                memory_text = f"the trial needs ~{need_bytes / GIB:.1f} GiB"
                yield f"{free / GIB:.1f} GiB of memory are free{place}, and {memory_text}"
        return
    readings, groups = [_read(reader) for _, reader in trial_devices], platform.group_of_hosts
    for (device, reader), figures in zip(trial_devices, readings, strict=True):
        if figures is not None:
            total = float(device.memory_bytes or nan)
            group = groups.get(device.host, 0)
            budget = min(float(platform.task.cluster.groups[group].memory_bytes or total), total)
            idle = float(platform.costs.groups[group].memory.device_used_bytes(np.zeros(1))[0])
            reason = busy_reason(device, reader, figures.get(MEMORY_IN_USE, nan), budget, idle)
        else:
            reason = "does not respond" if any(readings) else ""
        if reason:
            yield f"{device.title} {reason}"


def _trial_devices(platform: Platform) -> list[tuple[Device, Telemetry]]:
    """Return the devices of a trial and their telemetry: the first of each host, or those that `envs` select."""
    spec, groups = platform.task.spec, platform.task.cluster.groups
    pairs = list(zip(platform.read_devices, platform.telemetry, strict=False))
    if (names := platform.selected_devices) is not None:
        return [pair for pair in pairs if str(pair[0].index) in names]
    cards = spec.work.cards if isinstance(spec.work, ServeSpec) else None
    found: list[tuple[Device, Telemetry]] = []
    for host in dict.fromkeys(device.host for device, _ in pairs):
        count = groups[platform.group_of_hosts.get(host, 0)].devices_per_node
        found += [pair for pair in pairs if pair[0].host == host][: min(cards or count, count)]
    return found


def _read(reader: Telemetry) -> dict[str, float] | None:
    """Return the figures of a device: None if it does not respond, empty if its telemetry fails."""
    try:
        return dict(reader.sample())
    except LookupError:
        return None
    except NoDevice as error:  # raised by the proxy of a plugin
        return None if isinstance(error.__cause__, LookupError) else {}
    except Exception:
        return {}


def busy_reason(device: Device, reader: Telemetry, used: float, budget: float, idle: float) -> str:
    """Return why a trial that needs `budget` bytes cannot use a device with `used` bytes in use; empty if it can.

    `idle` is the memory in use on a device without tensors.
    """
    total = float(device.memory_bytes or nan)
    if used < 0 or used > total:
        return f"reports {used / GIB:.1f} of {total / GIB:.1f} GiB in use, which is impossible"
    use = _use(reader)
    if use.blocked:
        return use.blocked
    if total - used < FREE_SHARE * budget and used > idle:
        processes = ", ".join(use.processes[:MAX_PROCESSES])
        return f"has {used / GIB:.1f} of {total / GIB:.1f} GiB in use" + (f" by {processes}" if processes else "")
    return ""


def _use(reader: Telemetry) -> DeviceUse:
    try:
        return device_use(reader)
    except Exception:  # a device with unknown use counts as free
        return DeviceUse()
