"""probe: run single ranks of a candidate, each in a separate process on one device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

from flagcore.contracts import Launcher, MultiHostLauncher, Platform, RunningLaunch, Workload, require_prober
from flagcore.domain.candidate import Candidate
from flagcore.domain.effects import effects_of, engine_candidate, engine_task, environment_of, task_to_start
from flagcore.domain.launch import Exit, Launch, failure
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.probe import Probe, RankProbe
from flagcore.domain.spec import Task
from flagcore.domain.trial import TimeLimit, TrialState
from flagcore.errors import FlagError, LaunchError
from flagcore.files import read_regular

POLL_SECONDS = 60.0
PARALLEL_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _RunningRank:
    probe: RankProbe
    process: Future[RunningLaunch]
    """Done once the rank is started: a host may take long to answer, while others need their heartbeats."""
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
    """Probe `ranks` of `candidate`, by default those of `Prober.probe_ranks`, in parallel on `devices` of each host.

    Each rank has its own folder in `folder`. `limit` is the time limit of all ranks together. `on_rank` is called
    before each rank starts. Ranks that succeeded in the folders of `earlier` probes are not repeated. Without `finish`,
    the probe ends when a rank fails, and ranks that still run are dropped. Raises FlagError if a rank cannot be
    started. On an exception, all processes are ended.
    """
    chosen = tuple(ranks) or ranks_to_probe(platform, workload, candidate)
    predicted = _predict_ranks(platform, workload, candidate, chosen)
    results = {
        rank: result
        for rank in chosen
        if (result := _earlier_result(earlier, rank, predicted[rank], workload, platform))
    }
    waiting, running = [rank for rank in chosen if rank not in results], list[_RunningRank]()
    deadline, places = time.monotonic() + limit.seconds, _places(platform, launcher, devices)
    with ThreadPoolExecutor(len(places)) as threads:
        try:
            while waiting or running:
                free = sorted(set(range(len(places))) - {each.probe.device for each in running})
                for place, rank in zip(free, tuple(waiting), strict=False):
                    waiting.remove(rank)
                    on_rank(rank)
                    started = RankProbe(rank=rank, state=TrialState.FAILED, predicted=predicted[rank], device=place)
                    rank_limit = replace(limit, seconds=max(1.0, deadline - time.monotonic()))
                    planned = _planned(platform, workload, candidate, rank, places[place], folder)
                    process = threads.submit(launcher.start, platform.limited(planned, rank_limit))
                    running.append(_RunningRank(started, process, planned.folder))
                each, ended = _wait_for_any(running)
                running.remove(each)
                result = _outcome(each, ended, platform, workload, limit)
                results[result.rank] = result
                if result.measured is None and not finish:
                    break
        finally:
            for each in running:
                with suppress(FlagError):
                    each.process.result().stop()
    return Probe(candidate=candidate, ranks=tuple(results[rank] for rank in chosen if rank in results))


def ranks_to_probe(platform: Platform, workload: Workload, candidate: Candidate) -> tuple[int, ...]:
    """Return the ranks that a probe of `candidate` runs by default."""
    task = platform.task
    return require_prober(workload).probe_ranks(
        _engine_task(task, candidate), engine_candidate(task, candidate), platform.costs
    )


def _predict_ranks(
    platform: Platform, workload: Workload, candidate: Candidate, ranks: Sequence[int]
) -> dict[int, RankPrediction]:
    prober, task = require_prober(workload), _engine_task(platform.task, candidate)
    columns = workload.columns(task, engine_candidate(platform.task, candidate).as_dict())
    return {rank: prober.rank(task, columns, rank, platform.costs) for rank in ranks}


def _engine_task(task: Task, candidate: Candidate) -> Task:
    """Return the task for calling the engine, with the effects of a candidate's knobs."""
    return engine_task(task, effects_of(task, candidate.as_dict()))


def _earlier_result(
    folders: Sequence[str], rank: int, predicted: RankPrediction, workload: Workload, platform: Platform
) -> RankProbe | None:
    """Return the first result of a successful probe of a rank in `folders`, or None."""
    for folder in folders:
        rank_folder = os.path.join(folder, f"rank-{rank}")
        with suppress(OSError, ValueError, KeyError, TypeError, FlagError):
            ended = json.loads(read_regular(os.path.join(rank_folder, "exit.json")))
            if ended["code"] == 0 and ended["ended_by"] is None:
                measured = require_prober(workload).read_probe(platform.task, rank_folder)
                return RankProbe(rank=rank, state=TrialState.MEASURED, predicted=predicted, measured=measured)
    return None


def _places(platform: Platform, launcher: Launcher, devices: int) -> list[tuple[tuple[str, ...], int]]:
    """Return host and device of each rank that runs in parallel: different hosts first; no host for this machine."""
    spec = platform.task.spec
    several = spec.on_each_host and isinstance(launcher, MultiHostLauncher)
    hosts = [(host,) for host in spec.cluster.hosts] if several else [()]
    return [(host, device) for device in range(devices) for host in hosts]


def _planned(
    platform: Platform,
    workload: Workload,
    candidate: Candidate,
    rank: int,
    place: tuple[tuple[str, ...], int],
    folder: str,
) -> Launch:
    rank_folder = os.path.join(folder, f"rank-{rank}")
    try:
        os.makedirs(rank_folder, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{rank_folder} cannot be created: {error.strerror or error}") from None
    effects = effects_of(platform.task, candidate.as_dict())
    planned = require_prober(workload).probe_launch(
        replace(platform, task=task_to_start(platform.task, effects)),
        engine_candidate(platform.task, candidate),
        rank,
        rank_folder,
        place[1],
    )
    planned = replace(planned, environment={**planned.environment, **environment_of(effects)}, hosts=place[0])
    return platform.prepared(planned)


def _wait_for_any(running: Sequence[_RunningRank]) -> tuple[_RunningRank, Exit]:
    poll_seconds = POLL_SECONDS if len(running) == 1 else PARALLEL_POLL_SECONDS
    while True:
        for each in running:
            wait([each.process], timeout=poll_seconds)
            if each.process.done() and (ended := each.process.result().wait(poll_seconds)) is not None:
                return each, ended


def _outcome(each: _RunningRank, ended: Exit, platform: Platform, workload: Workload, limit: TimeLimit) -> RankProbe:
    result, folder = replace(each.probe, duration_s=ended.duration_s), each.folder
    if ended.code == 0 and ended.ended_by is None:
        try:
            measured = require_prober(workload).read_probe(platform.task, folder)
        except FlagError as error:
            return replace(result, reason=str(error))
        return replace(result, state=TrialState.MEASURED, measured=measured)
    patterns = (*platform.failure_patterns, *workload.failure_patterns())
    state, reason = failure(ended, folder, patterns, limit)
    return replace(result, state=state, reason=reason, inconclusive=ended.ended_by == "host")
