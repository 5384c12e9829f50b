"""Select a task's devices and hosts, check that they exist, divide them among trials, and wait until they are free."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import nan
from typing import Any

import numpy as np

from flagcore.contracts import Platform, Telemetry, device_use
from flagcore.domain.chip import MEMORY_IN_USE, Device, DeviceUse
from flagcore.domain.engine import device_variables, without_devices
from flagcore.domain.spec import AUTO, Task
from flagcore.domain.trial import RUN
from flagcore.errors import NoDevice
from flagcore.i18n import N_, Message, _


def on_hosts(platform: Platform, hosts: tuple[str, ...]) -> Platform:
    """Return the platform for trials on `hosts` only."""
    spec = platform.task.spec
    task = replace(platform.task, spec=replace(spec, cluster=replace(spec.cluster, hosts=hosts)))
    devices = tuple(device for host in hosts for device in platform.devices if device.host == host)
    return replace(platform, task=task, devices=devices)


def with_selected_devices(platform: Platform, devices: Sequence[Device] = ()) -> Platform:
    """Return the platform with the environment variables that select devices added to its spec.

    On this machine, the variables select `devices`, or the devices of a trial if `devices` is empty. Another host
    gets variables only if the trial does not use the host's first devices in order.
    """
    spec = platform.task.spec
    if not spec.on_each_host:
        chosen = devices or (platform.devices_of() if platform.devices else ())
        variables = device_variables(platform.support, chosen) if chosen else {}
        return replace(platform, task=replace(platform.task, spec=replace(spec, envs={**spec.envs, **variables})))
    host_envs = dict(spec.cluster.host_envs)
    for host in dict.fromkeys(device.host for device in platform.devices):
        support, set_variables = platform.variables_of(host)
        used = platform.devices_of(host)
        is_default = all(each.selector == str(place) and not each.within for place, each in enumerate(used))
        if not is_default and not set_variables.keys() & set(support.visible_devices):
            host_envs[host] = {**host_envs.get(host, {}), **device_variables(support, used)}
    cluster = replace(spec.cluster, host_envs=host_envs)
    return replace(platform, task=replace(platform.task, spec=replace(spec, cluster=cluster)))


def without_local_devices(platform: Platform) -> Platform:
    """Return the platform without this machine's devices, for a host or pod that assigns devices itself."""
    spec = platform.task.spec
    spec = replace(spec, envs=without_devices(platform.support, spec.envs))
    return replace(platform, task=replace(platform.task, spec=spec), devices=())


def divide(platform: Platform) -> tuple[tuple[Platform, ...], str]:
    """Divide the devices into up to `control.parallel_trials` disjoint groups, and return the platform of each group.

    If the spec asks for several groups, but only one is possible, the second value is the reason. Otherwise, it is
    empty.
    """
    control = platform.task.spec.control
    if control.parallel_trials == 1 or control.fidelity != RUN:
        return (platform,), ""
    if problem := _problem(platform):
        return (platform,), Message("trials run one at a time: {why}", why=problem)
    units, needed, platform_on = _units(platform)
    on_hosts = platform.task.spec.on_each_host
    count = (len(units) - (platform.task.spec.cluster.spares if on_hosts else 0)) // needed
    if count < 2:
        text = N_("trials run one at a time: each needs {needed} of {count} devices")
        return (platform,), Message(text, needed=needed, count=len(units))
    count = count if control.parallel_trials == AUTO else min(count, int(control.parallel_trials))
    groups = [units[index * needed : (index + 1) * needed] for index in range(count)]
    if on_hosts:  # distribute the other hosts as spares
        groups = [(*group, *units[count * needed :][index::count]) for index, group in enumerate(groups)]
    return tuple(platform_on(tuple(group)) for group in groups), ""


def _problem(platform: Platform) -> str:
    """Return why the devices cannot be divided, or an empty string if they can."""
    task, support = platform.task, platform.support
    if task.spec.on_each_host:
        return ""
    if task.cluster.groups[0].nodes > 1 or len(task.cluster.groups) > 1:
        return Message("the user's command starts on all nodes")
    if support.shared_devices and not task.spec.work.has_steps:
        return Message("servers on a CPU share its cores with the load generator")
    if not (support.visible_devices or support.shared_devices):
        return Message("the plugin of {chip} names no variable that selects devices", chip=task.cluster.chips)
    return ""


def _units(platform: Platform) -> tuple[Sequence[Any], int, Callable[[Any], Platform]]:
    """Return the hosts, cores or devices that trials can use, how many of them one trial needs, and a function of them.

    The function returns the platform of trials that run on the hosts, cores or devices in a tuple.
    """
    spec, group = platform.task.spec, platform.task.cluster.groups[0]
    if spec.on_each_host:
        return spec.cluster.hosts, spec.trial_nodes, partial(on_hosts, platform)
    if platform.support.shared_devices:
        cores = sorted(os.sched_getaffinity(0))[: len(platform.devices)]
        return cores, group.devices_per_node, lambda units: replace(platform, cores=units)
    return platform.devices, platform.task.devices_on(group), lambda units: replace(platform, devices=units)


FREE_SHARE = 0.95
"""A device counts as free if at least this share of a trial's memory budget is free, because displays use up to a few
percent. Chosen by hand. It also counts as free if no more memory is in use than the memory model expects without
tensors, because the drivers of some chips use more."""

POLL_SECONDS = 2.0
SETTLE_SECONDS = 5.0
"""The time that a driver may need to free the memory of a process that has ended."""

MAX_PROCESSES = 3
"""The maximum number of processes that a message names for one device."""

GIB = 2**30


def device_readers(platform: Platform) -> tuple[tuple[int, Device, Telemetry], ...]:
    """Return the devices of a trial that have telemetry, each with its number in the whole cluster and its reader."""
    groups = platform.task.cluster.groups
    counts = {host: groups[index].devices_per_node for host, index in platform.group_of_hosts.items()}
    starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    return tuple(
        (starts.get(host, 0) + place, device, platform.telemetry[device])
        for host in dict.fromkeys(device.host for device in platform.devices)
        for place, device in enumerate(platform.devices_of(host))
        if device in platform.telemetry
    )


def wait_for_devices(
    platform: Platform,
    need_bytes: float,
    seconds: float,
    on_wait: Callable[[str], object] = lambda busy: None,
    pause: Callable[[float], object] = time.sleep,
) -> str:
    """Wait at most `seconds` until the devices of a trial are free.

    Return why they are still busy, or an empty string if they are free. Devices without readings count as free.

    - `need_bytes`: the memory that the trial needs. It is checked only if devices share the memory of the machine.
    - `on_wait`: called once with the reason if the trial has to wait.
    - `pause`: called to sleep for a number of seconds.
    """
    deadline, has_waited = time.monotonic() + seconds, False
    while busy := "; ".join(_busy_devices(platform, need_bytes)):
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return busy
        if not has_waited:
            on_wait(busy)
        has_waited = True
        pause(min(POLL_SECONDS, seconds_left))
    return ""


def _busy_devices(platform: Platform, need_bytes: float) -> Iterator[str]:
    """Yield a line for each device that a trial cannot use, or for each host if devices share its memory."""
    if platform.support.shared_devices:
        # each reader reports the memory of the whole machine
        reader_by_host = {device.host: reader for _, device, reader in reversed(device_readers(platform))}
        for host, reader in reader_by_host.items():
            free = _use(reader).free_bytes
            if free is not None and free < need_bytes:
                place = f" on {host}" if host else ""
                memory_text = f"the trial needs ~{need_bytes / GIB:.1f} GiB"
                yield f"{free / GIB:.1f} GiB of memory are free{place}, and {memory_text}"
        return
    readers, groups = device_readers(platform), platform.group_of_hosts
    readings = [_read(reader) for _, _, reader in readers]
    for (_number, device, reader), figures in zip(readers, readings, strict=True):
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


def _read(reader: Telemetry) -> dict[str, float] | None:
    """Return the readings of a device, None if it does not respond, or an empty dict if its telemetry fails."""
    try:
        return dict(reader.sample())
    except LookupError:
        return None
    except NoDevice as error:  # raised by a plugin's proxy, with the plugin's error as its cause
        return None if isinstance(error.__cause__, LookupError) else {}
    except Exception:
        return {}


def busy_reason(device: Device, reader: Telemetry, used: float, budget: float, idle: float) -> str:
    """Return why a trial that needs `budget` bytes cannot use a device, or an empty string if it can.

    `used`: bytes in use on the device. `idle`: bytes in use on a device without tensors.
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


def require_devices(platform: Platform, devices: tuple[Device, ...], *, needed: int | None = None) -> None:
    """Raise NoDevice unless this machine, or the hosts of the spec, have the devices that trials need.

    `devices`: all detected devices. `needed`: the required number of devices; by default, the devices of a node.
    """
    cluster, support, work = platform.task.cluster, platform.support, platform.task.spec.work
    if work.command is None and (support.device_type is None or support.distributed_backend is None):
        text = N_("no installed plugin defines how {engine} runs on {chip}; give a {where}.command")
        raise NoDevice(_(text, engine=work.engine, chip=cluster.chips, where=work.kind))
    if platform.task.spec.on_each_host and not devices:
        return  # the devices of the hosts are unknown
    if platform.setups and platform.task.spec.on_each_host:
        _require_of_groups(platform.task, devices)
    else:
        _require_of_node(platform, devices, needed)


def _require_of_groups(task: Task, devices: Sequence[Device]) -> None:
    """Raise NoDevice unless the first host of each node group has the devices of the group, as far as known."""
    groups, hosts = task.cluster.groups, task.spec.cluster.hosts
    first_hosts = accumulate((group.nodes for group in groups[:-1]), initial=0)
    for group, first in zip(groups, first_hosts, strict=True):
        host = hosts[first]
        host_devices = [device for device in devices if device.host == host]
        usable = [device for device in host_devices if group.chip.has_name(device.chip)]
        if host_devices and len(usable) < group.devices_per_node:
            names = {"host": host, "wanted": group.devices_per_node, "count": len(usable), "chip": group.chip.name}
            text = N_("cluster.groups needs {wanted} {chip} on {host}, but it has {count}")
            raise NoDevice(_(text, **names))


def _require_of_node(platform: Platform, devices: Sequence[Device], needed: int | None) -> None:
    """Raise NoDevice unless the first host has `needed` devices of a chip of the cluster, or those of a node."""
    cluster, support = platform.task.cluster, platform.support
    first_host_devices = [each for each in devices if each.host == devices[0].host]
    devices_of_groups = (
        (group, [each for each in first_host_devices if group.chip.has_name(each.chip)]) for group in cluster.groups
    )
    group, usable = max(devices_of_groups, key=lambda pair: bool(pair[1]))
    if not usable:
        text = N_(
            "no {chip} on this machine, so nothing can be run; `flag estimate` and `flag tune --fidelity estimate` "
            "plan without it"
        )
        raise NoDevice(_(text, chip=cluster.chips))
    if len(usable) < (needed or group.devices_per_node) and not support.shared_devices:
        text = N_("cluster.devices_per_node = {wanted}, but this machine has {count} {chip}")
        raise NoDevice(_(text, wanted=group.devices_per_node, count=len(usable), chip=group.chip.name))
    if not group.usable(usable, size := needed or platform.task.devices_on(group)):
        text = N_(
            "a run on {size} {chip} takes devices 0 to {last} of a node, or the next {size}, which one link joins; "
            "usable here: {devices}; select them with {variable}"
        )
        found, variable = ", ".join(str(each.index) for each in usable), (*support.visible_devices, "")[0]
        raise NoDevice(_(text, size=size, chip=group.chip.name, last=size - 1, devices=found, variable=variable))


def parallel_probe_ranks(platform: Platform) -> int:
    """Return the number of ranks that can be probed in parallel on a host.

    It is one per device, or one in total if devices share memory, as on a CPU.
    """
    first_host_devices = [each for each in platform.devices if each.host == platform.devices[0].host]
    usable = [each for each in first_host_devices if platform.task.cluster.groups[0].chip.has_name(each.chip)]
    return 1 if platform.support.shared_devices else max(1, len(usable))
