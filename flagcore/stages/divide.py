"""divide: split the devices or hosts of a task into groups for parallel trials."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from flagcore.contracts import Platform
from flagcore.domain.chip import Device
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import AUTO
from flagcore.domain.trial import RUN
from flagcore.i18n import N_, Message


def divide(platform: Platform, devices: Sequence[Device]) -> tuple[tuple[Platform, ...], str]:
    """Return the platforms of up to `control.parallel_trials` disjoint groups of devices.

    If there is only one group although the spec asks for several, also return the reason, else an empty string.
    """
    control = platform.task.spec.control
    if control.parallel_trials == 1 or control.fidelity != RUN:
        return (platform,), ""
    if problem := _problem(platform):
        return (platform,), Message("trials run one at a time: {why}", why=problem)
    units, needed = _units(platform, devices)
    on_hosts = platform.task.spec.on_each_host
    count = (len(units) - (platform.task.spec.cluster.spares if on_hosts else 0)) // needed
    if count < 2:
        text = N_("trials run one at a time: each needs {needed} of {count} devices")
        return (platform,), Message(text, needed=needed, count=len(units))
    count = count if control.parallel_trials == AUTO else min(count, int(control.parallel_trials))
    groups = [units[index * needed : (index + 1) * needed] for index in range(count)]
    if on_hosts:  # the other hosts are spares
        groups = [(*group, *units[count * needed :][index::count]) for index, group in enumerate(groups)]
    return tuple(_platform_on(platform, group) for group in groups), ""


def _problem(platform: Platform) -> str:
    """Return why the devices cannot be divided; empty if they can."""
    task, support = platform.task, platform.support
    if task.spec.on_each_host:
        return ""
    if task.cluster.groups[0].nodes > 1 or len(task.cluster.groups) > 1:
        return Message("the user's command starts on all nodes")
    if support.shared_devices and isinstance(task.spec.work, ServeSpec):
        return Message("servers on a CPU share its cores with their load")
    if support.visible_devices is None and not support.shared_devices:
        return Message("the plugin of {chip} names no variable that selects devices", chip=task.cluster.chips)
    return ""


def _units(platform: Platform, devices: Sequence[Device]) -> tuple[tuple[str, ...], int]:
    """Return the names of the hosts, cores or devices for trials, and the number that a trial needs."""
    spec, group = platform.task.spec, platform.task.cluster.groups[0]
    if spec.on_each_host:
        return spec.cluster.hosts, max(spec.trial_nodes)
    usable = [device for device in devices if group.chip.has_name(device.chip)]
    if platform.support.shared_devices:
        return tuple(map(str, sorted(os.sched_getaffinity(0))[: len(usable)])), group.devices_per_node
    visible = os.environ.get(platform.support.visible_devices or "")
    inherited = None if visible is None else tuple(name.strip() for name in visible.split(","))
    names = platform.selected_devices or inherited or tuple(str(device.index) for device in usable)
    cards = spec.work.cards if isinstance(spec.work, ServeSpec) else None
    return names, min(cards or group.devices_per_node, group.devices_per_node)


def _platform_on(platform: Platform, units: Sequence[str]) -> Platform:
    """Return the platform of trials on some hosts, cores or devices."""
    task, spec = platform.task, platform.task.spec
    if spec.on_each_host:
        return platform.on_hosts(tuple(units))
    if platform.support.shared_devices:
        return replace(platform, cores=tuple(map(int, units)))
    assert platform.support.visible_devices
    spec = replace(spec, envs={**spec.envs, platform.support.visible_devices: ",".join(units)})
    return replace(platform, task=replace(task, spec=spec))
