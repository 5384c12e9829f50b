"""launch: start a trial of a candidate with its limits, and with what the spec and the plugins add to its launch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.contracts import Launcher, Platform, RunningLaunch
from flagcore.domain.launch import Launch
from flagcore.domain.space import Candidate
from flagcore.domain.spec import HOSTFILE, KIND, SLOTS, Task
from flagcore.domain.trial import TimeLimit
from flagcore.errors import LaunchError
from flagcore.tuner.devices import with_selected_devices
from flagcore.tuner.effects import effects_of, engine_candidate, environment_of, task_to_start, with_flags


def launch(
    platform: Platform,
    launcher: Launcher,
    candidate: Candidate,
    folder: str,
    limit: TimeLimit,
    *,
    cold: bool = False,
    stop_above_s: float | None = None,
) -> RunningLaunch:
    """Start a trial of `candidate` in `folder`, and return the running launch.

    The launcher ends the trial after `limit` or, if devices share the memory of the machine, when it exceeds the memory
    budget. The engine gets the target of `limit` as `max_time_per_task`, or else the limit itself, and may stop a trial
    whose step time is certain to exceed `stop_above_s`. A `cold` trial starts as a new process. Raises FlagError if the
    trial cannot be started.
    """
    spec = platform.task.spec
    control = replace(spec.control, max_time_per_task=limit.target_s or limit.seconds)
    task = replace(platform.task, spec=replace(spec, control=control), stop_above_s=stop_above_s)
    platform = with_selected_devices(replace(platform, task=task))
    planned = prepared_launch(platform, planned_launch(platform, candidate, folder))
    planned = replace(planned, warm=planned.warm and platform.task.spec.control.warm_start and not cold)
    return launcher.start(limited_launch(platform, planned, limit))


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
    group = platform.task.cluster.groups[0]
    memory_bytes = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
    return replace(
        planned,
        timeout_seconds=limit.seconds,
        timeout_because=limit.because,
        memory_limit_bytes=memory_bytes if platform.support.shared_devices else None,
        disk_limit_bytes=platform.task.spec.control.disk_limit or planned.disk_limit_bytes,
    )


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
