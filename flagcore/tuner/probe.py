"""Runs single ranks of a candidate, and combines their measurements with its prediction."""

import os
import posixpath
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flagcore.contracts import Launcher, MemoryModel, Platform, RunningLaunch, communicator_bytes, probes_of
from flagcore.domain.launch import INCONCLUSIVE, Exit, Launch, failure
from flagcore.domain.prediction import Prediction
from flagcore.domain.probe import Probe, RankMeasurement, RankProbe
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, TimeLimit, Trial, TrialState
from flagcore.errors import FlagError, LaunchError
from flagcore.tuner.devices import with_selected_devices
from flagcore.tuner.effects import effects_of, engine_candidate, environment_of, task_to_start
from flagcore.tuner.stages.launch import limited_launch, prepared_launch

POLL_SECONDS = 60.0
PARALLEL_POLL_SECONDS = 0.1


class _RunningRank(NamedTuple):
    probe: RankProbe
    process: Future[RunningLaunch]
    """The start of the rank, as a future, because a slow host must not delay the heartbeats of the other ranks."""
    folder: str


def probe(
    platform: Platform,
    launcher: Launcher,
    candidate: Candidate,
    folder: str,
    limit: TimeLimit,
    ranks: Sequence[int] = (),
    on_rank: Callable[[int], object] = lambda rank: None,
    *,
    finish: bool = True,
    devices: int = 1,
) -> Probe:
    """Probe `ranks` of `candidate`, in parallel on `devices` devices of each host.

    Each rank has its own folder in `folder`. Raises FlagError if a rank cannot be started. On an exception, all
    processes are ended.

    - `limit`: the time limit of all ranks together.
    - `ranks`: by default, the ranks that `Probes.ranks` returns.
    - `on_rank`: called before each rank starts.
    - `finish`: if it is false, the probe ends when a rank fails, and ranks that still run are dropped.
    """
    chosen_ranks = tuple(ranks) or ranks_to_probe(platform, candidate)
    prober, task = probes_of(platform.engine), _engine_task(platform.task, candidate)
    columns = platform.engine.columns(task, engine_candidate(platform.task, candidate).as_dict())
    predicted = {rank: prober.predict(task, columns, rank, platform.costs) for rank in chosen_ranks}
    results, waiting, running = dict[int, RankProbe](), [*chosen_ranks], list[_RunningRank]()
    deadline, places = time.monotonic() + limit.seconds, _places(platform, devices)
    with ThreadPoolExecutor(len(places)) as threads:
        try:
            while waiting or running:
                free = sorted(set(range(len(places))) - {each.probe.device for each in running})
                for place, rank in zip(free, tuple(waiting), strict=False):
                    waiting.remove(rank)
                    on_rank(rank)
                    started = RankProbe(rank=rank, state=TrialState.FAILED, predicted=predicted[rank], device=place)
                    rank_limit = replace(limit, seconds=max(1.0, deadline - time.monotonic()))
                    planned = _planned(platform, candidate, rank, places[place], folder)
                    process = threads.submit(launcher.start, limited_launch(platform, planned, rank_limit))
                    running.append(_RunningRank(started, process, planned.folder))
                each, ended = _wait_for_any(running)
                running.remove(each)
                result = _outcome(each, ended, platform, limit)
                results[result.rank] = result
                if result.measured is None and not finish:
                    break
        finally:
            for each in running:
                with suppress(FlagError):
                    each.process.result().stop()
    return Probe(candidate=candidate, ranks=tuple(results[rank] for rank in chosen_ranks if rank in results))


def ranks_to_probe(platform: Platform, candidate: Candidate) -> tuple[int, ...]:
    """Return the ranks that a probe of `candidate` runs by default."""
    task = platform.task
    engine = _engine_task(task, candidate)
    return probes_of(platform.engine).ranks(engine, engine_candidate(task, candidate), platform.costs)


def _engine_task(task: Task, candidate: Candidate) -> Task:
    """Return the task as the engine sees it, with the settings that the candidate's knobs change."""
    return task.for_engine(effects_of(task, candidate.as_dict()))


def _places(platform: Platform, devices: int) -> list[tuple[tuple[str, ...], int]]:
    """Return the host (empty for this machine) and the device of each rank that runs in parallel, other hosts first."""
    spec = platform.task.spec
    hosts = [(host,) for host in spec.cluster.hosts] if spec.on_each_host else [()]
    return [(host, device) for device in range(devices) for host in hosts]


def _planned(
    platform: Platform, candidate: Candidate, rank: int, place: tuple[tuple[str, ...], int], folder: str
) -> Launch:
    """Return the launch that probes one global rank at `place`, which is a host and the index of its device."""
    rank_folder = os.path.join(folder, f"rank-{rank}")
    try:
        os.makedirs(rank_folder, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{rank_folder} cannot be created: {error.strerror or error}") from None
    hosts, device = place
    if not hosts and platform.devices and platform.support.visible_devices:  # the rank sees only its own device
        platform, device = with_selected_devices(platform, platform.devices[device : device + 1]), 0
    effects = effects_of(platform.task, candidate.as_dict())
    planned = probes_of(platform.engine).launch(
        replace(platform, task=task_to_start(platform.task, effects)),
        engine_candidate(platform.task, candidate),
        rank,
        rank_folder,
        device,
    )
    planned = replace(planned, environment={**planned.environment, **environment_of(effects)}, hosts=hosts)
    return prepared_launch(platform, planned)


def _wait_for_any(running: Sequence[_RunningRank]) -> tuple[_RunningRank, Exit]:
    poll_seconds = POLL_SECONDS if len(running) == 1 else PARALLEL_POLL_SECONDS
    while True:
        for each in running:
            wait([each.process], timeout=poll_seconds)
            if each.process.done() and (ended := each.process.result().wait(poll_seconds)) is not None:
                return each, ended


def _outcome(each: _RunningRank, ended: Exit, platform: Platform, limit: TimeLimit) -> RankProbe:
    result, folder = replace(each.probe, duration_s=ended.duration_s), each.folder
    if ended.code == 0 and ended.ended_by is None:
        try:
            measured = probes_of(platform.engine).read(platform.task, folder)
        except FlagError as error:
            return replace(result, reason=str(error))
        return replace(result, state=TrialState.MEASURED, measured=measured)
    patterns = (*platform.failure_patterns, *platform.engine.failures)
    state, reason = failure(ended, folder, patterns, platform.task.spec.secrets, limit)
    return replace(result, state=state, reason=reason, inconclusive=ended.ended_by in INCONCLUSIVE)


GIB = 2**30
PROBED_INTERVAL = (0.97, 1.2)
"""The bounds of the 80% interval of probed times, relative to the probe: the 10th and 90th percentiles of 34 ranks of
real jobs on shared cores (docs/plan.md)."""
WORK_PARTS = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
"""The parts of a step in which a pipeline stage computes. The part `pp_bubble_s` is proportional to their sum."""


def combine(prediction: Prediction, probe: Probe, platform: Platform) -> Prediction:
    """Return `prediction` with probed memory, compute and optimizer times, and predicted communication and bubble.

    The bubble is scaled with the sum of WORK_PARTS. The memory is the maximum over the ranks, and so are the
    times. Without a measurement, these figures are unchanged. If a rank ran out of memory, the candidate does not fit.
    """
    return _memory(_time(prediction, probe), probe, platform.costs.memory)


def _memory(prediction: Prediction, probe: Probe, memory: MemoryModel) -> Prediction:
    """Return `prediction` with the memory of the probed rank that uses most."""
    capacity = prediction.capacity_bytes
    buffers = 0.0
    if communicator_bytes(memory):
        buffers = prediction.device_used_bytes - _device_used(prediction.reserved_bytes, memory)
    ranks = [(_used(rank, memory, buffers), rank) for rank in probe.measured]
    if ranks:
        (reserved, used), worst = max(ranks, key=lambda each: each[0][1])
        prediction = replace(
            prediction,
            static_bytes=float(worst.static_bytes),
            activation_bytes=float(max(0, worst.peak_forward_backward_bytes - worst.static_bytes)),
            peak_allocated_bytes=float(worst.peak_allocated_bytes),
            reserved_bytes=reserved,
            device_used_bytes=used,
            worst_stage=worst.stage,
            fits=None if capacity is None else used <= capacity,
            components={},
        )
    if probe.out_of_memory:
        lower_bound = max(prediction.device_used_bytes, capacity or 0.0)
        prediction = replace(prediction, device_used_bytes=lower_bound, fits=False)
    return prediction


def _used(rank: RankMeasurement, memory: MemoryModel, buffers: float) -> tuple[float, float]:
    """Return a rank's reserved memory, and its memory in use with the `buffers` of communicators, in bytes."""
    allocated = np.array([float(rank.peak_allocated_bytes)])
    reserved = float(memory.reserved_bytes(allocated)[0]) if rank.reserved_bytes is None else float(rank.reserved_bytes)
    return reserved, max(_device_used(reserved, memory), float(rank.device_used_bytes)) + buffers


def _device_used(reserved: float, memory: MemoryModel) -> float:
    """Return the bytes in use on a device whose allocator has reserved `reserved` bytes."""
    return float(memory.device_used_bytes(np.array([reserved]))[0])


def _time(prediction: Prediction, probe: Probe) -> Prediction:
    """Return `prediction` with the compute and optimizer times of the slowest probed ranks."""
    predicted = prediction.time_s
    total, low, high = prediction.step_time_s, prediction.low_s, prediction.high_s
    if not probe.measured or total is None or low is None or high is None:
        return prediction
    probed = {
        "compute_s": max(rank.compute_time_s for rank in probe.measured),
        "optimizer_s": max(rank.optimizer_time_s for rank in probe.measured),
    }
    work = sum(predicted.get(name, 0.0) for name in WORK_PARTS)
    slowdown = (work - predicted["compute_s"] + probed["compute_s"]) / work if work else 1.0
    time_s = {**predicted, **probed}
    if "pp_bubble_s" in predicted:
        time_s["pp_bubble_s"] *= slowdown
    probed_s = sum(probed.values())
    step = sum(time_s.values())
    return replace(
        prediction,
        step_time_s=step,
        low_s=probed_s * PROBED_INTERVAL[0] + (step - probed_s) * low / total,
        high_s=probed_s * PROBED_INTERVAL[1] + (step - probed_s) * high / total,
        time_s=time_s,
    )


def trial_of_probe(platform: Platform, trial: Trial, probe: Probe, predicted: Prediction) -> Trial:
    """Return the finished `trial` of a probe, with its measurement or with the reason for the failure.

    The trial fails if a rank failed. It is out of memory if a rank ran out of memory, or needs more than a device has.
    """
    failed = [rank for rank in probe.ranks if rank.measured is None]
    failed.sort(key=lambda rank: rank.state is not TrialState.OUT_OF_MEMORY)
    shown_rank = failed[0] if failed else probe.ranks[-1]
    log = posixpath.join(posixpath.dirname(trial.log), f"rank-{shown_rank.rank}", posixpath.basename(trial.log))
    finished = replace(trial, duration_s=probe.duration_s, log=log)
    if failed:
        reason, lost = f"rank {failed[0].rank}: {failed[0].reason}", failed[0].inconclusive
        return replace(finished, state=failed[0].state, reason=reason, inconclusive=lost)
    combined = combine(predicted, probe, platform)
    if combined.step_time_s is None:
        return replace(finished, state=TrialState.FAILED, reason="the time of communication is unknown")
    finished = replace(finished, measurement=_measurement(platform.task, probe, combined, combined.step_time_s))
    if combined.fits is False:
        needed, available = combined.device_used_bytes / GIB, (combined.capacity_bytes or 0.0) / GIB
        reason = f"a rank of stage {combined.worst_stage} needs {needed:.2f} GiB of {available:.2f} GiB"
        return replace(finished, state=TrialState.OUT_OF_MEMORY, reason=reason)
    return replace(finished, state=TrialState.MEASURED)


def _measurement(task: Task, probe: Probe, combined: Prediction, step: float) -> Measurement:
    """Return the measurement of a probed candidate whose combined step takes `step` seconds."""
    tokens, ranks = task.spec.work.step_tokens, probe.measured
    slowest = max(ranks, key=lambda rank: rank.compute_time_s)
    optimizer = max(ranks, key=lambda rank: rank.optimizer_time_s)
    caching = any(rank.reserved_bytes is not None for rank in ranks)
    return Measurement(
        step_times_s=(step,),
        step_time_s=step,
        spread_s=slowest.compute_spread_s + optimizer.optimizer_spread_s,
        tokens_per_second_per_device=tokens / step / task.cluster.devices,
        peak_allocated_bytes=int(combined.peak_allocated_bytes),
        peak_reserved_bytes=int(combined.reserved_bytes) if caching else None,
        device_used_bytes=int(combined.device_used_bytes),
        versions=slowest.versions,
        modelled_s=step - combined.time_s["compute_s"] - combined.time_s["optimizer_s"],
        low_s=combined.low_s,
        high_s=combined.high_s,
    )
