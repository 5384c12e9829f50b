"""combine: replace parts of a prediction by probed figures, and finish the trials of probes."""

from __future__ import annotations

import posixpath
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from flagcore.contracts import MemoryModel, communicator_bytes
from flagcore.domain.prediction import Prediction
from flagcore.domain.probe import Probe, RankMeasurement
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, Trial, TrialState

GIB = 2**30
PROBED_INTERVAL = (0.97, 1.2)
"""The bounds of the 80% interval of probed times, relative to the probe: the 10th and 90th percentiles of 34 ranks of
real jobs on shared cores (docs/probe.md)."""


def combine(prediction: Prediction, probe: Probe, memory: MemoryModel, work_parts: Collection[str]) -> Prediction:
    """Return `prediction` with probed memory, compute and optimizer times, and predicted communication and bubble.

    `work_parts` are those of the Prober; the bubble is scaled with them. The memory is that of the rank that needs
    most, the time that of the slowest rank. Without a measurement, the prediction stays as it is.
    """
    return _memory(_time(prediction, probe, work_parts), probe, memory)


def _memory(prediction: Prediction, probe: Probe, memory: MemoryModel) -> Prediction:
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
    """Return the reserved memory and the memory in use of a rank, including `buffers` of communicators."""
    allocated = np.array([float(rank.peak_allocated_bytes)])
    reserved = float(memory.reserved_bytes(allocated)[0]) if rank.reserved_bytes is None else float(rank.reserved_bytes)
    return reserved, max(_device_used(reserved, memory), float(rank.device_used_bytes)) + buffers


def _device_used(reserved: float, memory: MemoryModel) -> float:
    return float(memory.device_used_bytes(np.array([reserved]))[0])


def _time(prediction: Prediction, probe: Probe, work_parts: Collection[str]) -> Prediction:
    predicted = prediction.time_s
    total, low, high = prediction.step_time_s, prediction.low_s, prediction.high_s
    if not probe.measured or total is None or low is None or high is None:
        return prediction
    probed = {
        "compute_s": max(rank.compute_time_s for rank in probe.measured),
        "optimizer_s": max(rank.optimizer_time_s for rank in probe.measured),
    }
    work = sum(predicted.get(name, 0.0) for name in work_parts)
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


def trial_of_probe(task: Task, trial: Trial, probe: Probe, combined: Prediction) -> Trial:
    """Return the finished `trial` of a probe with the measurement from `combined`, or with the reason of the failure.

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
    if combined.step_time_s is None:
        return replace(finished, state=TrialState.FAILED, reason="the time of communication is unknown")
    finished = replace(finished, measurement=_measurement(task, probe, combined, combined.step_time_s))
    if combined.fits is False:
        needed, available = combined.device_used_bytes / GIB, (combined.capacity_bytes or 0.0) / GIB
        reason = f"a rank of stage {combined.worst_stage} needs {needed:.2f} GiB of {available:.2f} GiB"
        return replace(finished, state=TrialState.OUT_OF_MEMORY, reason=reason)
    return replace(finished, state=TrialState.MEASURED)


def _measurement(task: Task, probe: Probe, combined: Prediction, step: float) -> Measurement:
    train, ranks = task.spec.train, probe.measured
    slowest = max(ranks, key=lambda rank: rank.compute_time_s)
    optimizer = max(ranks, key=lambda rank: rank.optimizer_time_s)
    caching = any(rank.reserved_bytes is not None for rank in ranks)
    return Measurement(
        step_times_s=(step,),
        step_time_s=step,
        spread_s=slowest.compute_spread_s + optimizer.optimizer_spread_s,
        tokens_per_second_per_device=train.global_batch_size * train.seq_length / step / task.cluster.devices,
        peak_allocated_bytes=int(combined.peak_allocated_bytes),
        peak_reserved_bytes=int(combined.reserved_bytes) if caching else None,
        device_used_bytes=int(combined.device_used_bytes),
        versions=slowest.versions,
        modelled_s=step - combined.time_s["compute_s"] - combined.time_s["optimizer_s"],
        low_s=combined.low_s,
        high_s=combined.high_s,
    )
