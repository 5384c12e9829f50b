"""Runs one rank of a larger job in one process, without the other ranks.

Collectives take no time and messages arrive immediately, so the times are the rank's own. Only as many micro-batches
run as fill the pipeline: memory has reached its peak, and further micro-batches take the same time.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import parallel_state as groups

from flagcore.engines.megatron.trial import metrics, torch_patches
from flagcore.engines.megatron.trial.device import RankDevice
from flagcore.engines.megatron.trial.job import Job, Probe
from flagcore.engines.megatron.trial.model import BuiltModel
from flagcore.engines.megatron.trial.rank import start_rank
from flagcore.engines.megatron.trial.training import Batch, clear_gradients, forward_backward, memory_step, microbatches


def probe_rank(job: Job, probe: Probe, import_s: float) -> None:
    """Run the rank for `train_iters` steps and write its measurements to `metrics.json`."""

    def join() -> None:
        torch_patches.init_fake_world(job.device.type, probe.rank, job.world_size)

    rank_device, built, startup = start_rank(job, probe.device, join)
    stage = groups.get_pipeline_model_parallel_rank()
    count = job.enough_microbatches(stage)
    finish = _TimedFunction(built.config.finalize_model_grads_func, rank_device)
    built.config.finalize_model_grads_func = finish
    log = metrics.StepLog(job.output)
    steps = []
    for number in range(job.train.train_iters):
        batches = microbatches(job, number, rank_device.device, count)
        steps.append(_timed_step(job, built, rank_device, batches, finish))
        log.write({"step": number, **steps[-1]})
        if number == 0:
            peaks = memory_step(job, built, rank_device, microbatches(job, 1, rank_device.device, count))
            static_bytes = rank_device.allocated_bytes()
    log.close()
    report = {
        "schema_version": metrics.SCHEMA_VERSION,
        "rank": probe.rank,
        "stage": stage,
        "steps": [{"step": number, **step} for number, step in enumerate(steps)],
        "static_bytes": static_bytes,
        "peak_forward_backward_bytes": peaks[0],
        "peak_optimizer_bytes": peaks[1],
        **dataclasses.asdict(rank_device.memory()),
        "num_microbatches": job.num_microbatches,
        "microbatches_run": count,
        "parameters": metrics.local_parameters(built),
        "effective": metrics.effective(job, built, job.num_microbatches, [metrics.local_layers(built)]),
        "versions": metrics.versions(job),
        "startup_s": {"import": import_s, "build": sum(startup.values())},
    }
    metrics.write_metrics(job.output, report)


def _timed_step(
    job: Job, built: BuiltModel, rank_device: RankDevice, batches: list[Batch], finish: _TimedFunction
) -> dict[str, float]:
    """Run one step and return the seconds of the rank's own work.

    `schedule_s` is the time of the micro-batches that ran; `once_s` is the time to clear gradients and to finish them
    after the last micro-batch. `compute_s` is forward and backward of a step with all micro-batches.
    """
    clock = rank_device.clock
    finish.seconds = 0.0
    start = clock()
    clear_gradients(built)
    clear_end = clock()
    forward_backward(job, built, batches)
    schedule_end = clock()
    built.optimizer.step()
    end = clock()
    schedule, outside_schedule = schedule_end - clear_end - finish.seconds, clear_end - start + finish.seconds
    return {
        "compute_s": schedule * job.num_microbatches / len(batches) + outside_schedule,
        "schedule_s": schedule,
        "once_s": outside_schedule,
        "optimizer_s": end - schedule_end,
    }


class _TimedFunction:
    """Wraps a function and sums up the seconds of its calls."""

    def __init__(self, function: Any, rank_device: RankDevice) -> None:
        self._function, self._device = function, rank_device
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._device.clock()
        result = self._function(*args, **kwargs)
        self.seconds += self._device.clock() - start
        return result
