"""probe: let one device play ranks of a candidate whose world is not there, each in a process of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from flagcore.contracts import Launcher, Platform, Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.failure import classify, log_tail
from flagcore.domain.launch import Exit
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.probe import Probe, RankProbe
from flagcore.domain.trial import TrialState
from flagcore.errors import FlagError, LaunchError
from flagcore.files import read_regular

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
    *,
    earlier: Sequence[str] = (),
    to_the_end: bool = True,
) -> Probe:
    """Probe `ranks` of `candidate`, by default those that tell most of it, one after the other.

    Each has a folder of its own in `folder`; all together are ended after `seconds`. `on_rank` is told each rank before
    it starts. What ended well in the folders of `earlier` probes of the same is not probed again. A rank that fails is
    a result, and unless `to_the_end` the last one. Raises FlagError if none can be started; KeyboardInterrupt ends the
    processes, and passes.
    """
    task = platform.task
    chosen = tuple(ranks) or workload.probe_ranks(task, candidate, platform.costs)
    columns = workload.columns(task, candidate.as_dict())
    ends, done = time.monotonic() + seconds, []
    for rank in chosen:
        predicted = workload.rank(task, columns, rank, platform.costs)
        known = _known(earlier, rank, predicted, workload, platform)
        if known is not None:
            done.append(known)
            continue
        if on_rank is not None:
            on_rank(rank)
        where = os.path.join(folder, f"rank-{rank}")
        left = max(1.0, ends - time.monotonic())
        ended = _run(platform, workload, launcher, candidate, rank, where, left)
        blank = RankProbe(rank=rank, state=TrialState.FAILED, predicted=predicted, duration_s=ended.duration_s)
        done.append(_outcome(blank, ended, platform, workload, where))
        if done[-1].measured is None and not to_the_end:
            break
    return Probe(candidate=candidate, ranks=tuple(done))


def _known(
    folders: Sequence[str], rank: int, predicted: RankPrediction, workload: Workload, platform: Platform
) -> RankProbe | None:
    """Return what an earlier probe of a rank, in one of several folders, left when it ended well, or None."""
    for folder in folders:
        where = os.path.join(folder, f"rank-{rank}")
        with suppress(OSError, ValueError, KeyError, TypeError, FlagError):
            ended = json.loads(read_regular(os.path.join(where, "exit.json")))
            if ended["code"] == 0 and ended["ended_by"] is None:
                measured = workload.read_probe(platform.task, where)
                return RankProbe(rank=rank, state=TrialState.MEASURED, predicted=predicted, measured=measured)
    return None


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
