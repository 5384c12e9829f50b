"""Runs one rank of a larger job in one process, without the other ranks.

Collectives take no time and messages arrive at once, so the times are the rank's own. Of a step with more micro-batches
than fill the pipeline, only that many are run: memory has reached its peak, and further micro-batches take as long.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as groups

from flagcore.engines.megatron.trial import metrics, stand_ins
from flagcore.engines.megatron.trial.device import RankDevice, open_device
from flagcore.engines.megatron.trial.job import Job, Probe
from flagcore.engines.megatron.trial.model import Built, build
from flagcore.engines.megatron.trial.rank import make_groups
from flagcore.engines.megatron.trial.training import Batch, clear_gradients, forward_backward, memory_step, microbatches


@dataclass(frozen=True)
class ProbeStep:
    """One step of the rank: seconds of its own work.

    `schedule_s` is for the micro-batches that were run; `once_s` is what a step does once: clearing gradients, and
    finishing them after the last micro-batch. `compute_s` is forward and backward of a whole step.
    """

    step: int
    compute_s: float
    schedule_s: float
    once_s: float
    optimizer_s: float


def probe_rank(job: Job, probe: Probe, import_s: float) -> None:
    """Run the rank for `train_iters` steps and write its figures to `metrics.json`."""
    torch.set_num_threads(job.device.threads_per_rank)
    rank_device = open_device(job.device.type, probe.device)
    if job.device.type == "cpu":
        stand_ins.stand_in_for_cuda()
    start = time.perf_counter()
    stand_ins.init_fake_world(job.device.type, probe.rank, job.world_size)
    make_groups(job)
    rank_device.set_baseline()
    built = build(job, rank_device.device)
    rank_device.model_built()
    count = job.enough_microbatches(groups.get_pipeline_model_parallel_rank())
    build_end = time.perf_counter()
    log = metrics.StepLog(job.output)
    runner = _RankRunner(job, built, rank_device, count)
    steps = [runner.step(0)]
    log.write(steps[0])
    peaks = memory_step(job, built, rank_device, runner.batches(1))
    static_bytes = rank_device.allocated_bytes()
    for number in range(1, job.train.train_iters):
        steps.append(runner.step(number))
        log.write(steps[-1])
    log.close()
    report = {
        "schema_version": metrics.SCHEMA_VERSION,
        "rank": probe.rank,
        "stage": groups.get_pipeline_model_parallel_rank(),
        "steps": [dataclasses.asdict(step) for step in steps],
        "static_bytes": static_bytes,
        "peak_forward_backward_bytes": peaks[0],
        "peak_optimizer_bytes": peaks[1],
        **dataclasses.asdict(rank_device.memory()),
        "num_microbatches": job.num_microbatches,
        "microbatches_run": count,
        "parameters": metrics.local_parameters(built),
        "effective": metrics.effective(job, built, job.num_microbatches, [metrics.local_layers(built)]),
        "versions": metrics.versions(),
        "startup_s": {"import": import_s, "build": build_end - start},
    }
    metrics.write_metrics(job.output, report)


class _RankRunner:
    """Plays one step after the other."""

    def __init__(self, job: Job, built: Built, rank_device: RankDevice, count: int) -> None:
        self._job, self._built, self._device, self._count = job, built, rank_device, count
        self._finish = _Timed(built.config.finalize_model_grads_func, rank_device)
        built.config.finalize_model_grads_func = self._finish

    def batches(self, number: int) -> list[Batch]:
        return microbatches(self._job, number, self._device.device, self._count)

    def step(self, number: int) -> ProbeStep:
        job, built, clock = self._job, self._built, self._device.clock
        batches = self.batches(number)
        self._finish.seconds = 0.0
        start = clock()
        clear_gradients(built)
        cleared = clock()
        forward_backward(job, built, batches)
        middle = clock()
        built.optimizer.step()
        end = clock()
        schedule, once = middle - cleared - self._finish.seconds, cleared - start + self._finish.seconds
        return ProbeStep(
            step=number,
            compute_s=schedule * job.num_microbatches / self._count + once,
            schedule_s=schedule,
            once_s=once,
            optimizer_s=end - middle,
        )


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
