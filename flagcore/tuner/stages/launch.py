"""launch: start a trial of a candidate with its limits."""

from dataclasses import replace

from flagcore.contracts import Launcher, Platform, RunningLaunch
from flagcore.domain.space import Candidate
from flagcore.domain.trial import TimeLimit
from flagcore.tuner.launches import limited_launch, planned_launch, prepared_launch, with_selected_devices


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
