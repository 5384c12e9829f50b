"""judge: what the probe of a candidate makes of its trial."""

from __future__ import annotations

import posixpath
from dataclasses import replace

from flagcore.domain.prediction import Prediction
from flagcore.domain.probe import Probe
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, Trial, TrialState

GIB = 2**30


def judge(task: Task, trial: Trial, probe: Probe, combined: Prediction) -> Trial:
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
