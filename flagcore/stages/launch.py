"""launch: start a trial of one candidate, with its limits."""

from __future__ import annotations

from dataclasses import replace

from flagcore.contracts import Launcher, Platform, Running, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.effects import effects_of, engine_candidate, environment_of, task_to_start, with_flags
from flagcore.domain.launch import Launch
from flagcore.domain.trial import TimeLimit


def launch(
    platform: Platform, workload: Workload, launcher: Launcher, candidate: Candidate, folder: str, limit: TimeLimit
) -> Running:
    """Start a trial of `candidate` in `folder`, and return it while it runs.

    It is ended after `limit`; on a CPU also if its processes exceed the cluster's memory budget. Raises FlagError
    if it cannot be started.
    """
    platform = replace(platform, task=platform.task.with_time_limit(limit.seconds))
    planned = platform.prepared(planned_launch(platform, workload, candidate, folder))
    return launcher.start(platform.limited(planned, limit))


def planned_launch(
    platform: Platform, workload: Workload, candidate: Candidate, folder: str, *, for_real: bool = False
) -> Launch:
    """Return how the engine starts a candidate, with the settings, flags and variables of knobs with effects."""
    task = platform.task
    effects = effects_of(task, candidate.as_dict())
    bare = replace(platform, task=with_flags(task_to_start(task, effects), effects))
    planned = workload.launch(bare, engine_candidate(task, candidate), folder, for_real=for_real)
    cluster = task.spec.cluster
    hosts = cluster.hosts[: cluster.nodes] if task.spec.on_each_host and not for_real else ()
    return replace(planned, environment={**planned.environment, **environment_of(effects)}, hosts=hosts)
