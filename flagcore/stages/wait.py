"""wait: until the devices of a trial are free, for a limited time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import nan

from flagcore.contracts import Platform, Telemetry, device_use
from flagcore.domain.chip import Device
from flagcore.domain.devices import MEMORY_IN_USE, DeviceUse
from flagcore.domain.serving import ServeSpec
from flagcore.errors import NoDevice

FREE_SHARE = 0.95
"""A device is free if this share of the memory that a trial may use is: drivers and displays take a little."""

POLL_SECONDS = 2.0
SETTLE_SECONDS = 5.0
"""A driver may need as long until the memory of a process that ended is free."""

MAX_PROCESSES = 3
"""The most processes named for a device."""

GIB = 2**30


def wait_for_devices(
    platform: Platform,
    need_bytes: float,
    seconds: float,
    on_wait: Callable[[str], object] = lambda busy: None,
    pause: Callable[[float], object] = time.sleep,
) -> str:
    """Wait at most `seconds` until the devices of a trial are free, and return who uses them then, empty if free.

    `need_bytes` is what the trial is predicted to need of the machine's memory where its devices share that. `on_wait`
    is called once if it waits, `pause` for a few seconds at a time. What telemetry cannot read is taken as free.
    """
    ends, waits = time.monotonic() + seconds, False
    while busy := "; ".join(_in_use(platform, need_bytes)):
        left = ends - time.monotonic()
        if left <= 0:
            return busy
        if not waits:
            on_wait(busy)
        waits = True
        pause(min(POLL_SECONDS, left))
    return ""


def _in_use(platform: Platform, need_bytes: float) -> Iterator[str]:
    """Yield a line for each device that a trial cannot have."""
    used = _devices(platform)
    if platform.support.shared_devices:
        of_hosts = {device.host: reader for device, reader in reversed(used)}  # each reads the whole machine
        for host, reader in of_hosts.items():
            free = _use(reader).free_bytes
            if free is not None and free < need_bytes:
                where = f" on {host}" if host else ""
                needs = f"the trial needs ~{need_bytes / GIB:.1f} GiB"
                yield f"{free / GIB:.1f} GiB of memory are free{where}, and {needs}"
        return
    figures = [_figures(reader) for _, reader in used]
    for (device, reader), found in zip(used, figures, strict=True):
        if found is not None:
            why = _why_not(platform, device, reader, found.get(MEMORY_IN_USE, nan))
        else:
            why = "does not answer" if any(figures) else ""
        if why:
            yield f"{device.title} {why}"


def _devices(platform: Platform) -> list[tuple[Device, Telemetry]]:
    """Return the devices of a trial and their telemetry: the first of each host, or those that `envs` select."""
    spec, group = platform.task.spec, platform.task.cluster.groups[0]
    pairs = list(zip(platform.read_devices, platform.telemetry, strict=False))
    if (names := platform.selected_devices) is not None:
        return [pair for pair in pairs if str(pair[0].index) in names]
    cards = spec.work.cards if isinstance(spec.work, ServeSpec) else None
    count = min(cards or group.devices_per_node, group.devices_per_node)
    hosts = dict.fromkeys(device.host for device, _ in pairs)
    return [pair for host in hosts for pair in [each for each in pairs if each[0].host == host][:count]]


def _figures(reader: Telemetry) -> dict[str, float] | None:
    """Return the figures of a device, None if it no longer answers; without any if its telemetry fails."""
    try:
        return dict(reader.sample())
    except LookupError:
        return None
    except NoDevice as error:  # what a plugin raised
        return None if isinstance(error.__cause__, LookupError) else {}
    except Exception:
        return {}


def _why_not(platform: Platform, device: Device, reader: Telemetry, used: float) -> str:
    """Return why a trial cannot have a device; empty if it can."""
    total = float(device.memory_bytes or nan)
    if used < 0 or used > total:
        return f"reports {used / GIB:.1f} of {total / GIB:.1f} GiB in use, which cannot be"
    use = _use(reader)
    if use.blocked:
        return use.blocked
    budget = min(float(platform.task.cluster.groups[0].memory_bytes or total), total)
    if total - used < FREE_SHARE * budget:
        several = ", ".join(use.processes[:MAX_PROCESSES])
        return f"has {used / GIB:.1f} of {total / GIB:.1f} GiB in use" + (f" by {several}" if several else "")
    return ""


def _use(reader: Telemetry) -> DeviceUse:
    try:
        return device_use(reader)
    except Exception:  # unknown use is no obstacle
        return DeviceUse()
