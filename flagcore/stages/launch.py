"""launch: start one candidate for real, under its limits."""

from __future__ import annotations

from dataclasses import replace

from flagcore.contracts import Launcher, Platform, Running, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch


def launch(
    platform: Platform, workload: Workload, launcher: Launcher, candidate: Candidate, folder: str, seconds: float
) -> Running:
    """Start a trial of `candidate` in `folder` and return it running.

    It is ended after `seconds`; where processes live in the machine's own memory, also when they outgrow
    the cluster's budget. Raises FlagError if it cannot be started.
    """
    group = platform.task.cluster.groups[0]
    memory = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
    planned = replace(
        prepared(platform, workload.launch(platform, candidate, folder)),
        timeout_seconds=seconds,
        memory_limit_bytes=memory if platform.support.shared_devices else None,
    )
    return launcher.start(planned)


def prepared(platform: Platform, planned: Launch) -> Launch:
    """Return `planned` with the plugins' environment, then the spec's, and whatever plugins change in it."""
    environment = {**planned.environment, **platform.environment, **platform.task.spec.envs}
    return platform.prepare_launch(replace(planned, environment=environment))
