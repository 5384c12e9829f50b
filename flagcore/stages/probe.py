"""probe: run single ranks of a candidate on one device, each in a separate process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from flagcore.contracts import Launcher, Platform, RunningLaunch, Workload, require_prober
from flagcore.domain.candidate import Candidate
from flagcore.domain.effects import effects_of, engine_candidate, engine_task, environment_of, task_to_start
from flagcore.domain.launch import Exit, failure
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.probe import Probe, RankProbe
from flagcore.domain.spec import Task
from flagcore.domain.trial import TimeLimit, TrialState
from flagcore.errors import FlagError, LaunchError
from flagcore.files import read_regular

POLL_SECONDS = 60.0
POLL_OF_SEVERAL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _RunningRank:
    blank: RankProbe
    process: RunningLaunch
    folder: str


def probe(
    platform: Platform,
    workload: Workload,
    launcher: Launcher,
    candidate: Candidate,
    folder: str,
    limit: TimeLimit,
    ranks: Sequence[int] = (),
    on_rank: Callable[[int], object] = lambda rank: None,
    *,
    earlier: Sequence[str] = (),
    finish: bool = True,
    devices: int = 1,
) -> Probe:
    """Probe `ranks` of `candidate`, by default those of `Prober.probe_ranks`, on several `devices` at once.

    Each has a folder in `folder`; all are ended after `limit` in total. `on_rank` is called with each rank before it
    starts. Ranks that succeeded in the folders of `earlier` probes are not repeated. A failed rank is a result, and
    the last one unless `finish`: running ones are ended and dropped. Raises FlagError if one cannot be started.
    Processes are ended on every exception.
    """
    chosen = tuple(ranks) or ranks_to_probe(platform, workload, candidate)
    predicted = _predicted(platform, workload, candidate, chosen)
    done = {rank: known for rank in chosen if (known := _known(earlier, rank, predicted[rank], workload, platform))}
    waiting, running_ranks = [rank for rank in chosen if rank not in done], list[_RunningRank]()
    ends = time.monotonic() + limit.seconds
    try:
        while waiting or running_ranks:
            free = sorted(set(range(devices)) - {each.blank.device for each in running_ranks})
            for device, rank in zip(free, tuple(waiting), strict=False):
                waiting.remove(rank)
                on_rank(rank)
                blank = RankProbe(rank=rank, state=TrialState.FAILED, predicted=predicted[rank], device=device)
                left = replace(limit, seconds=max(1.0, ends - time.monotonic()))
                running_ranks.append(_start(platform, workload, launcher, candidate, blank, folder, left))
            each, ended = _first(running_ranks)
            running_ranks.remove(each)
            found = _outcome(each, ended, platform, workload, limit)
            done[found.rank] = found
            if found.measured is None and not finish:
                break
    finally:
        for each in running_ranks:
            each.process.stop()
    return Probe(candidate=candidate, ranks=tuple(done[rank] for rank in chosen if rank in done))


def ranks_to_probe(platform: Platform, workload: Workload, candidate: Candidate) -> tuple[int, ...]:
    """Return the ranks that a probe of `candidate` runs by default."""
    own, as_set = engine_candidate(platform.task, candidate), _engine_task(platform.task, candidate)
    return require_prober(workload).probe_ranks(as_set, own, platform.costs)


def _predicted(
    platform: Platform, workload: Workload, candidate: Candidate, ranks: Sequence[int]
) -> dict[int, RankPrediction]:
    prober, as_set = require_prober(workload), _engine_task(platform.task, candidate)
    columns = workload.columns(as_set, engine_candidate(platform.task, candidate).as_dict())
    return {rank: prober.rank(as_set, columns, rank, platform.costs) for rank in ranks}


def _engine_task(task: Task, candidate: Candidate) -> Task:
    """Return `task` as the engine sees it, with the settings of the knobs of a candidate."""
    return engine_task(task, effects_of(task, candidate.as_dict()))


def _known(
    folders: Sequence[str], rank: int, predicted: RankPrediction, workload: Workload, platform: Platform
) -> RankProbe | None:
    """Return the result of an earlier successful probe of a rank in one of several folders, or None."""
    for folder in folders:
        where = os.path.join(folder, f"rank-{rank}")
        with suppress(OSError, ValueError, KeyError, TypeError, FlagError):
            ended = json.loads(read_regular(os.path.join(where, "exit.json")))
            if ended["code"] == 0 and ended["ended_by"] is None:
                measured = require_prober(workload).read_probe(platform.task, where)
                return RankProbe(rank=rank, state=TrialState.MEASURED, predicted=predicted, measured=measured)
    return None


def _start(
    platform: Platform,
    workload: Workload,
    launcher: Launcher,
    candidate: Candidate,
    blank: RankProbe,
    folder: str,
    limit: TimeLimit,
) -> _RunningRank:
    where = os.path.join(folder, f"rank-{blank.rank}")
    try:
        os.makedirs(where, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{where} cannot be made: {error.strerror or error}") from None
    task = platform.task
    effects, own = effects_of(task, candidate.as_dict()), engine_candidate(task, candidate)
    bare = replace(platform, task=task_to_start(task, effects))
    planned = require_prober(workload).probe_launch(bare, own, blank.rank, where, blank.device)
    variables = environment_of(effects)
    planned = platform.prepared(replace(planned, environment={**planned.environment, **variables}))
    return _RunningRank(blank, launcher.start(platform.limited(planned, limit)), where)


def _first(running_ranks: Sequence[_RunningRank]) -> tuple[_RunningRank, Exit]:
    patience = POLL_SECONDS if len(running_ranks) == 1 else POLL_OF_SEVERAL_SECONDS
    while True:
        for each in running_ranks:
            if (ended := each.process.wait(patience)) is not None:
                return each, ended


def _outcome(each: _RunningRank, ended: Exit, platform: Platform, workload: Workload, limit: TimeLimit) -> RankProbe:
    blank, folder = replace(each.blank, duration_s=ended.duration_s), each.folder
    if ended.code == 0 and ended.ended_by is None:
        try:
            measured = require_prober(workload).read_probe(platform.task, folder)
        except FlagError as error:
            return replace(blank, reason=str(error))
        return replace(blank, state=TrialState.MEASURED, measured=measured)
    patterns = (*platform.failure_patterns, *workload.failure_patterns())
    state, reason = failure(ended, folder, patterns, limit)
    return replace(blank, state=state, reason=reason)
