"""probe: let one device play ranks of a candidate whose world is not there, each in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from flagcore.contracts import Launcher, Platform, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.failure import classify, log_tail
from flagcore.domain.launch import Exit
from flagcore.domain.probe import Probe, RankProbe
from flagcore.domain.trial import TrialState
from flagcore.errors import FlagError, LaunchError

POLL_SECONDS = 60.0


def probe(
    platform: Platform,
    workload: Workload,
    launcher: Launcher,
    candidate: Candidate,
    folder: str,
    seconds: float,
    ranks: Sequence[int] = (),
    on_rank: Callable[[int], object] | None = None,
) -> Probe:
    """Probe `ranks` of `candidate`, by default those that tell most of it, one after the other.

    Each has a folder of its own in `folder`; all together are ended after `seconds`. `on_rank` is told each rank before
    it starts. A rank that fails is a result. Raises FlagError if none can be started; KeyboardInterrupt ends the
    processes, and passes.
    """
    task = platform.task
    chosen = tuple(ranks) or workload.probe_ranks(task, candidate, platform.costs)
    columns = workload.columns(task, candidate.as_dict())
    ends, done = time.monotonic() + seconds, []
    for rank in chosen:
        if on_rank is not None:
            on_rank(rank)
        where = os.path.join(folder, f"rank-{rank}")
        left = max(1.0, ends - time.monotonic())
        predicted = workload.rank(task, columns, rank, platform.costs)
        ended = _run(platform, workload, launcher, candidate, rank, where, left)
        blank = RankProbe(rank=rank, state=TrialState.FAILED, predicted=predicted, duration_s=ended.duration_s)
        done.append(_outcome(blank, ended, platform, workload, where))
    return Probe(candidate=candidate, ranks=tuple(done))


def _run(
    platform: Platform,
    workload: Workload,
    launcher: Launcher,
    candidate: Candidate,
    rank: int,
    folder: str,
    seconds: float,
) -> Exit:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be made: {error.strerror or error}") from None
    planned = platform.prepared(workload.probe_launch(platform, candidate, rank, folder))
    limits = replace(planned, timeout_seconds=seconds, memory_limit_bytes=platform.memory_limit_bytes)
    running = launcher.start(limits)
    try:
        while (ended := running.wait(POLL_SECONDS)) is None:
            pass
    except BaseException:
        running.stop()
        raise
    return ended


def _outcome(blank: RankProbe, ended: Exit, platform: Platform, workload: Workload, folder: str) -> RankProbe:
    if ended.code == 0 and ended.ended_by is None:
        try:
            measured = workload.read_probe(platform.task, folder)
        except FlagError as error:
            return replace(blank, reason=str(error))
        return replace(blank, state=TrialState.MEASURED, measured=measured)
    patterns = (*platform.failure_patterns, *workload.failure_patterns())
    state, reason = classify(ended, log_tail(folder), patterns)
    return replace(blank, state=state, reason=reason)
