"""combine: predictions with what was probed in place of its estimate, and the trials that such probes finish."""

from __future__ import annotations

import posixpath
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from flagcore.contracts import MemoryModel
from flagcore.domain.prediction import Prediction
from flagcore.domain.probe import Probe, RankMeasurement
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, Trial, TrialState

GIB = 2**30
PROBED = (0.97, 1.2)
"""Bounds of measured parts as shares of their probe: the 10th and 90th percentiles of 34 ranks of real worlds, on
shared cores (docs/probe.md); the same for every device, until others are measured."""


def combine(prediction: Prediction, probe: Probe, memory: MemoryModel, work_parts: Collection[str]) -> Prediction:
    """Return `prediction` with the probed memory, compute and optimizer, and modelled communication and bubble.

    `work_parts` are those of the Prober; the bubble is waiting for other stages, and grows with them.
    The rank that needs most decides about memory, the slowest about time. Nothing changes where nothing was measured.
    """
    return _memory(_time(prediction, probe, work_parts), probe, memory)


def _memory(prediction: Prediction, probe: Probe, memory: MemoryModel) -> Prediction:
    capacity = prediction.capacity_bytes
    used = [(_used(rank, memory), rank) for rank in probe.measured]
    if used:
        (reserved, shown), worst = max(used, key=lambda each: each[0][1])
        prediction = replace(
            prediction,
            static_bytes=float(worst.static_bytes),
            activation_bytes=float(max(0, worst.peak_forward_backward_bytes - worst.static_bytes)),
            peak_allocated_bytes=float(worst.peak_allocated_bytes),
            reserved_bytes=reserved,
            device_used_bytes=shown,
            worst_stage=worst.stage,
            fits=None if capacity is None else shown <= capacity,
            components={},
        )
    if probe.out_of_memory:
        least = max(prediction.device_used_bytes, capacity or 0.0)
        prediction = replace(prediction, device_used_bytes=least, fits=False)
    return prediction


def _used(rank: RankMeasurement, memory: MemoryModel) -> tuple[float, float]:
    """Return a rank's reserved memory and memory in use, including collective buffers."""
    allocated = np.array([float(rank.peak_allocated_bytes)])
    reserved = float(memory.reserved_bytes(allocated)[0]) if rank.reserved_bytes is None else float(rank.reserved_bytes)
    shown = float(memory.device_used_bytes(np.array([reserved]))[0])
    return reserved, max(shown, float(rank.device_used_bytes))


def _time(prediction: Prediction, probe: Probe, work_parts: Collection[str]) -> Prediction:
    before = prediction.time_s
    total, low, high = prediction.step_time_s, prediction.low_s, prediction.high_s
    if not probe.measured or total is None or low is None or high is None:
        return prediction
    probed = {
        "compute_s": max(rank.compute_time_s for rank in probe.measured),
        "optimizer_s": max(rank.optimizer_time_s for rank in probe.measured),
    }
    busy = sum(before.get(name, 0.0) for name in work_parts)
    slower = (busy - before["compute_s"] + probed["compute_s"]) / busy if busy else 1.0
    after = {**before, **probed}
    if "pp_bubble_s" in before:
        after["pp_bubble_s"] *= slower
    known = sum(probed.values())
    step = sum(after.values())
    return replace(
        prediction,
        step_time_s=step,
        low_s=known * PROBED[0] + (step - known) * low / total,
        high_s=known * PROBED[1] + (step - known) * high / total,
        time_s=after,
    )


def trial_of_probe(task: Task, trial: Trial, probe: Probe, combined: Prediction) -> Trial:
    """Return `trial` finished: measured as `combined` has it, or with the reason why it is not.

    A rank that fails, fails the candidate; one that ran out of memory, or needs more than a device has, rules it out.
    """
    failed = [rank for rank in probe.ranks if rank.measured is None]
    failed.sort(key=lambda rank: rank.state is not TrialState.OUT_OF_MEMORY)
    shown = failed[0] if failed else probe.ranks[-1]
    log = posixpath.join(posixpath.dirname(trial.log), f"rank-{shown.rank}", posixpath.basename(trial.log))
    done = replace(trial, duration_s=probe.duration_s, log=log)
    if failed:
        return replace(done, state=failed[0].state, reason=f"rank {failed[0].rank}: {failed[0].reason}")
    if combined.step_time_s is None:
        return replace(done, state=TrialState.FAILED, reason="the time of communication is unknown")
    done = replace(done, measurement=_measurement(task, probe, combined, combined.step_time_s))
    if combined.fits is False:
        need, have = combined.device_used_bytes / GIB, (combined.capacity_bytes or 0.0) / GIB
        reason = f"a rank of stage {combined.worst_stage} needs {need:.2f} GiB of {have:.2f} GiB"
        return replace(done, state=TrialState.OUT_OF_MEMORY, reason=reason)
    return replace(done, state=TrialState.MEASURED)


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
