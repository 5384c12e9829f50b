"""The launch of a candidate: what the engine plans, with what the spec and the plugins add to it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.contracts import Platform
from flagcore.domain.chip import Device
from flagcore.domain.engine import device_variables, without_devices
from flagcore.domain.launch import Launch
from flagcore.domain.space import Candidate
from flagcore.domain.spec import HOSTFILE, KIND, SLOTS, Task
from flagcore.domain.trial import TimeLimit
from flagcore.errors import LaunchError
from flagcore.tuner.effects import effects_of, engine_candidate, environment_of, task_to_start, with_flags


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


def prepared_launch(platform: Platform, planned: Launch) -> Launch:
    """Return the launch `planned` with the environment variables from plugins and from the spec.

    With several node groups, each host gets the variables of its chip, and the placeholders SLOTS and KIND in the
    command are replaced. Each host also gets the variables that the spec sets for that host.
    """
    if not (planned.hosts and (platform.setups or platform.task.spec.cluster.host_envs)):
        return _launch_on(platform, planned)
    on_host = {host: _launch_on(platform, planned, host) for host in planned.hosts}
    return replace(on_host[planned.hosts[0]], on_host=on_host)


def _launch_on(platform: Platform, planned: Launch, host: str = "") -> Launch:
    """Return the launch `planned` with the environment variables and placeholders of a host."""
    spec, setup, argv = platform.task.spec, platform.setup_of(host), planned.argv
    chip_envs, group_envs = platform.environment, spec.cluster.envs
    if setup:
        chip_envs, group_envs = setup.environment, setup.envs
        argv = tuple(word.replace(SLOTS, str(setup.devices)).replace(KIND, setup.kind) for word in argv)
    host_envs = spec.cluster.host_envs.get(host, {})
    environment = {**planned.environment, **chip_envs, **spec.envs, **group_envs, **host_envs}
    return replace(planned, argv=argv, environment=environment)


def limited_launch(platform: Platform, planned: Launch, limit: TimeLimit) -> Launch:
    """Return the launch `planned` with the time, memory and disk limits of a trial."""
    return replace(
        planned,
        timeout_seconds=limit.seconds,
        timeout_because=limit.because,
        memory_limit_bytes=_memory_limit_bytes(platform),
        disk_limit_bytes=platform.task.spec.control.disk_limit or planned.disk_limit_bytes,
    )


def _memory_limit_bytes(platform: Platform) -> int | None:
    """Return the bytes that all processes of a node may use if devices share its memory, otherwise None."""
    group = platform.task.cluster.groups[0]
    memory = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
    return memory if platform.support.shared_devices else None


def planned_launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
    """Return the engine's launch of a candidate, with the settings, flags and variables of each `Effect`.

    With `for_real`, it is the launch of the user's complete job instead of a trial.
    """
    task = platform.task
    effects = effects_of(task, candidate.as_dict())
    engine_platform = replace(platform, task=with_flags(task_to_start(task, effects), effects))
    planned = platform.engine.launch(engine_platform, engine_candidate(task, candidate), folder, for_real=for_real)
    hosts = task.spec.cluster.hosts[: task.spec.cluster.nodes]
    return replace(
        planned,
        argv=_with_hostfile(planned.argv, host_lines(task, planned.hosts or hosts), folder),
        environment={**planned.environment, **environment_of(effects)},
        hosts=(planned.hosts or hosts) if task.spec.on_each_host and not for_real else (),
    )


def host_lines(task: Task, hosts: Sequence[str]) -> list[str]:
    """Return the lines of a host file for `hosts`, a subset of the task's hosts.

    Each line contains the type of the host if the task has several node groups.
    """
    groups, requested = task.cluster.groups, task.spec.cluster
    kinds = [f" type={each.kind}" for each in requested.groups] or [""]
    group_lines = [f"slots={group.devices_per_node}{kind}" for group, kind in zip(groups, kinds, strict=True)]
    line_of_hosts = group_lines * len(requested.hosts)
    if len(groups) > 1:
        line_of_hosts = [row for row, group in zip(group_lines, groups, strict=True) for _ in range(group.nodes)]
    line_by_host = dict(zip(requested.hosts, line_of_hosts, strict=False))
    return [f"{host} {line_by_host[host]}" for host in hosts]


def _with_hostfile(argv: tuple[str, ...], hosts: Sequence[str], folder: str) -> tuple[str, ...]:
    """Write the lines `hosts` to a file in `folder`, and return the command with HOSTFILE replaced by its path."""
    if not hosts or not any(HOSTFILE in word for word in argv):
        return argv
    file = Path(folder, "hostfile")
    try:
        file.write_text("".join(f"{line}\n" for line in hosts), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror or error}") from None
    return tuple(word.replace(HOSTFILE, str(file)) for word in argv)
