"""Runs one rank of a larger job in one process, without the other ranks.

Collectives take no time and messages arrive at once, so the times are the rank's own. Of a step with more micro-batches
than fill the pipeline, only that many are run: memory has reached its peak, and further micro-batches take as long.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import parallel_state as groups

from flagcore.engines.megatron.trial import metrics, stand_ins
from flagcore.engines.megatron.trial.device import RankDevice
from flagcore.engines.megatron.trial.job import Job, Probe
from flagcore.engines.megatron.trial.model import Built
from flagcore.engines.megatron.trial.rank import start_rank
from flagcore.engines.megatron.trial.training import Batch, clear_gradients, forward_backward, memory_step, microbatches


def probe_rank(job: Job, probe: Probe, import_s: float) -> None:
    """Run the rank for `train_iters` steps and write its figures to `metrics.json`."""

    def join() -> None:
        stand_ins.init_fake_world(job.device.type, probe.rank, job.world_size)

    rank_device, built, startup = start_rank(job, probe.device, join)
    stage = groups.get_pipeline_model_parallel_rank()
    count = job.enough_microbatches(stage)
    finish = _Timed(built.config.finalize_model_grads_func, rank_device)
    built.config.finalize_model_grads_func = finish
    log = metrics.StepLog(job.output)
    steps = []
    for number in range(job.train.train_iters):
        batches = microbatches(job, number, rank_device.device, count)
        steps.append(_step(job, built, rank_device, batches, finish))
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


def _step(job: Job, built: Built, rank_device: RankDevice, batches: list[Batch], finish: _Timed) -> dict[str, float]:
    """Run one step and return seconds of the rank's own work.

    `schedule_s` is for the micro-batches that were run; `once_s` is what a step does once: clearing gradients, and
    finishing them after the last micro-batch. `compute_s` is forward and backward of a whole step.
    """
    clock = rank_device.clock
    finish.seconds = 0.0
    start = clock()
    clear_gradients(built)
    cleared = clock()
    forward_backward(job, built, batches)
    middle = clock()
    built.optimizer.step()
    end = clock()
    schedule, once = middle - cleared - finish.seconds, cleared - start + finish.seconds
    return {
        "compute_s": schedule * job.num_microbatches / len(batches) + once,
        "schedule_s": schedule,
        "once_s": once,
        "optimizer_s": end - middle,
    }


class _Timed:
    """A function whose time is summed."""

    def __init__(self, function: Any, rank_device: RankDevice) -> None:
        self._function, self._device = function, rank_device
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._device.clock()
        answer = self._function(*args, **kwargs)
        self.seconds += self._device.clock() - start
        return answer
