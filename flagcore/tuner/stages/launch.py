"""launch: start a trial of a candidate with its limits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.contracts import Launcher, Platform, RunningLaunch
from flagcore.domain.effects import effects_of, engine_candidate, environment_of, task_to_start, with_flags
from flagcore.domain.launch import Launch
from flagcore.domain.space import Candidate
from flagcore.domain.spec import HOSTFILE, Task
from flagcore.domain.trial import TimeLimit
from flagcore.errors import LaunchError


def with_hosts(platform: Platform, launcher: Launcher) -> Platform:
    """Return `platform` with the hosts of the next trial. Raises FlagError if too few usable hosts are left."""
    spec = platform.task.spec
    if not spec.on_each_host:
        return platform
    return platform.on_hosts(launcher.choose_hosts(spec.cluster.hosts, spec.cluster.nodes))


def nodes_left(platform: Platform, launcher: Launcher) -> int | None:
    """Return the number of nodes for the next trial if hosts were lost, or None if enough usable hosts are left."""
    spec = platform.task.spec
    if spec.cluster.min_nodes is None:
        return None
    usable = len(launcher.usable_hosts(spec.cluster.hosts))
    sizes = [nodes for nodes in spec.sizes if nodes <= usable] or spec.sizes[:1]
    return None if usable >= spec.trial_nodes else sizes[-1]


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
    platform = replace(platform, task=task).with_selected_devices()
    planned = platform.prepared_launch(planned_launch(platform, candidate, folder))
    planned = replace(planned, warm=planned.warm and platform.task.spec.control.warm_start and not cold)
    return launcher.start(platform.limited_launch(planned, limit))


def planned_launch(platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
    """Return the engine's launch of a candidate, with the settings, flags and variables of each `Effect`.

    With `for_real`, it is the launch of the user's complete job instead of a trial.
    """
    task = platform.task
    effects = effects_of(task, candidate.as_dict())
    engine_platform = replace(platform, task=with_flags(task_to_start(task, effects), effects))
    planned = platform.workload.launch(engine_platform, engine_candidate(task, candidate), folder, for_real=for_real)
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
