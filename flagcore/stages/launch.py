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
    planned = prepared(platform, workload.launch(platform, candidate, folder))
    limits = replace(planned, timeout_seconds=seconds, memory_limit_bytes=platform.memory_limit_bytes)
    return launcher.start(limits)


def prepared(platform: Platform, planned: Launch) -> Launch:
    """Return `planned` as the plugins and the spec want it started."""
    return platform.prepared(planned)
