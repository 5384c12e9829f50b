"""Runs one rank: it joins the others, builds its part of the model, trains, and reports through rank 0.

A probe runs one rank of a larger job in one process, without the other ranks. Collectives take no time and messages
arrive immediately, so the times are the rank's own. Only as many micro-batches run as fill the pipeline: memory has
reached its peak, and further micro-batches take the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as groups

from flagcore.domain.devices import SPEED_TEST
from flagcore.engines.megatron.trial import metrics, te, torch_patches
from flagcore.engines.megatron.trial.device import RankDevice, open_device, speed_test
from flagcore.engines.megatron.trial.job import Job, Probe
from flagcore.engines.megatron.trial.model import BuiltModel, build
from flagcore.engines.megatron.trial.training import (
    Batch,
    Step,
    clear_gradients,
    forward_backward,
    memory_step,
    microbatches,
    train,
)

_TIMEOUT = timedelta(minutes=10)  # a collective that waits longer has failed


def run_rank(job: Job, number: int, listener: socket.socket | None, import_s: float) -> None:
    """Run the job as rank `number`.

    `listener` is the socket of the rendezvous, which the parent opened on the first host. `import_s`, the seconds of
    the imports, is written to the metrics.
    """
    rank_device, built, startup = start_rank(job, number, lambda: _join(job, number, listener))
    job = job.on_replica(groups.get_data_parallel_rank())
    log = metrics.StepLog(job.output) if number == 0 else None
    cpu_start = time.process_time()
    steps: list[Step] = []
    for step in train(job, built, rank_device):
        steps.append(step)
        if log is not None:
            log.write(dataclasses.asdict(step))
    cpu_time_s = time.process_time() - cpu_start
    report = _report(job, built, steps, rank_device, cpu_time_s)
    if log is not None:
        log.close()
        metrics.write_metrics(job.output, {**report, "startup_s": {"import": import_s, **startup}})
    dist.barrier()  # rank 0 may serve the rendezvous, so all ranks wait until it has written the metrics
    dist.destroy_process_group()


def start_rank(job: Job, number: int, join: Callable[[], None]) -> tuple[RankDevice, BuiltModel, dict[str, float]]:
    """Open the device of rank `number`, join the other ranks, and build this rank's part of the model.

    The returned dictionary has the seconds of joining (`groups`) and of building (`build`).
    """
    te.check(job)
    torch.set_num_threads(job.device.threads_per_rank)
    rank_device = open_device(job.device.type, number % job.processes)
    if job.device.type == "cpu":
        torch_patches.map_cuda_to_cpu()
    start = time.perf_counter()
    join()
    _make_groups(job)
    rank_device.set_baseline()
    groups_end = time.perf_counter()
    built = build(job.on_replica(groups.get_data_parallel_rank()), rank_device.device)
    rank_device.reset_after_build()
    return rank_device, built, {"groups": groups_end - start, "build": time.perf_counter() - groups_end}


def _join(job: Job, number: int, listener: socket.socket | None) -> None:
    if job.nodes > 1:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    else:
        assert listener
        host, port = listener.getsockname()
    if job.device.backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # by default it resolves the host name
    store = dist.TCPStore(
        host,
        port,
        job.world_size,
        is_master=number == 0,
        timeout=_TIMEOUT,
        master_listen_fd=os.dup(listener.fileno()) if number == 0 and listener else None,
    )
    dist.init_process_group(job.device.backend, store=store, rank=number, world_size=job.world_size, timeout=_TIMEOUT)


def _make_groups(job: Job) -> None:
    """Create Megatron's process groups. Megatron checks the sizes."""
    candidate = job.candidate
    groups.initialize_model_parallel(
        tensor_model_parallel_size=candidate.tensor_model_parallel_size,
        pipeline_model_parallel_size=candidate.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=job.virtual_stages,
        context_parallel_size=candidate.context_parallel_size,
        expert_model_parallel_size=candidate.expert_model_parallel_size,
        expert_tensor_parallel_size=candidate.expert_tensor_parallel_size,
        distributed_timeout_minutes=int(_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
        order="tp-cp-ep-pp-dp" if job.shares else "tp-cp-ep-dp-pp",
        get_embedding_ranks=functools.partial(_embedding_ranks, job) if job.model.mtp_num_layers else None,
    )


def _embedding_ranks(job: Job, ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that share the embedding, as Megatron-LM's `pretrain_gpt.py`.

    They are the first one, that with multi-token prediction, and the last one if its head is tied.
    """
    stages, tied = job.stage_layers, not job.model.untie_embeddings_and_output_weights
    mtp = [place % len(ranks) for place, stage in enumerate(stages) if stage.mtp] or [-1]
    return sorted({ranks[0], ranks[mtp[0]], *ranks[-1:] * tied})


def _report(
    job: Job, built: BuiltModel, steps: list[Step], rank_device: RankDevice, cpu_time_s: float
) -> dict[str, Any]:
    """Gather the measurements of all ranks; every rank returns the same report."""
    own_report = {
        "rank": dist.get_rank(),
        "parameters": metrics.local_parameters(built),
        **dataclasses.asdict(rank_device.memory()),
        "cpu_time_s": cpu_time_s,
        "own_steps": [
            {"forward_backward_s": step.own_forward_backward_s, "optimizer_s": step.own_optimizer_s} for step in steps
        ],
        SPEED_TEST: speed_test(job, rank_device),
    }
    own_parameters = metrics.distinct_parameters(built)
    stage = groups.get_pipeline_model_parallel_rank()
    all_reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_reports, (own_report, own_parameters, stage, metrics.local_layers(built)))
    layers = {stage: count for _, _, stage, count in all_reports}
    layers_per_stage = [layers[stage] for stage in sorted(layers)]
    return {
        "schema_version": metrics.SCHEMA_VERSION,
        "steps": [dataclasses.asdict(step) for step in steps],
        "parameters": sum(own_parameters for _, own_parameters, _, _ in all_reports),
        "num_microbatches": job.num_microbatches,
        "ranks": [rank for rank, _, _, _ in all_reports],
        "effective": metrics.effective(job, built, job.num_microbatches, layers_per_stage),
        "versions": metrics.versions(job),
    }


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
