"""Runs one rank: it joins the other ranks, builds its part of the model, trains, and reports through rank 0.

The files of a trial are `steps.jsonl`, written while it runs, and `metrics.json`, written at its end.

A probe runs one rank of a larger job in one process, without the other ranks. Collectives take no time and messages
arrive immediately, so the times are the rank's own. It only runs as many micro-batches as fill the pipeline: then
memory has reached its peak, and further micro-batches take the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import platform
import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from flagcore_training.trial.rank_device import (
    TIMEOUT,
    RankDevice,
    append_step,
    join,
    open_device,
    speed_test,
    write_metrics,
)
from flagcore_training.trial.steps import Step
from megatron.core import parallel_state

from flagcore.domain.chip import SPEED_TEST
from flagcore.errors import NoDevice
from flagcore.loading.entry_points import installed, instance_of, load_checked
from flagcore_megatron.trial.config import check_layers
from flagcore_megatron.trial.device import init_fake_world, map_cuda_to_cpu
from flagcore_megatron.trial.job import Probe, TrialJob
from flagcore_megatron.trial.model import BuiltModel, build
from flagcore_megatron.trial.training import Batch, clear_gradients, forward_backward, memory_step, microbatches, train

LOG = logging.getLogger(__name__)
_SCHEMA_VERSION = 1
_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def run_rank(job: TrialJob, number: int, listener: socket.socket | None, import_s: float) -> None:
    """Run the job as the rank with the index `number`. `listener` is the socket of the rendezvous on the first host.

    `import_s`, the seconds of the imports, is written to the metrics.
    """
    if job.probe is not None:
        probe_rank(job, job.probe, import_s)
        return
    rank_device, built, startup = start_rank(job, number, lambda: join(job, number, listener))
    job = job.on_replica(parallel_state.get_data_parallel_rank())
    steps: list[Step] = []
    for step in train(job, built, rank_device):
        steps.append(step)
        if number == 0:
            append_step(job.output, dataclasses.asdict(step))
    report = _report(job, built, steps, rank_device)
    if number == 0:
        write_metrics(job.output, {**report, "startup_s": {"import": import_s, **startup}})
    dist.barrier()  # rank 0 may serve the rendezvous, so all ranks wait here until it has written the metrics
    dist.destroy_process_group()


def start_rank(job: TrialJob, number: int, join: Callable[[], None]) -> tuple[RankDevice, BuiltModel, dict[str, float]]:
    """Open the device of rank `number`, join the other ranks, and build this rank's part of the model.

    The returned dictionary contains the seconds of joining (`groups`) and of building (`build`).
    """
    check_layers(job)
    torch.set_num_threads(job.device.threads_per_rank)
    rank_device = open_device(job.device.type, number % job.processes)
    if job.device.type == "cpu":
        map_cuda_to_cpu()
    start = time.perf_counter()
    join()
    _make_groups(job)
    rank_device.set_baseline()
    groups_end = time.perf_counter()
    built = build(job.on_replica(parallel_state.get_data_parallel_rank()), rank_device.device)
    rank_device.reset_after_build()
    return rank_device, built, {"groups": groups_end - start, "build": time.perf_counter() - groups_end}


def _make_groups(job: TrialJob) -> None:
    """Create Megatron's process groups. Megatron checks the sizes."""
    candidate = job.candidate
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=candidate.tensor_model_parallel_size,
        pipeline_model_parallel_size=candidate.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=job.virtual_stages,
        context_parallel_size=candidate.context_parallel_size,
        expert_model_parallel_size=candidate.expert_model_parallel_size,
        expert_tensor_parallel_size=candidate.expert_tensor_parallel_size,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
        order="tp-cp-ep-pp-dp" if job.shares else "tp-cp-ep-dp-pp",
        get_embedding_ranks=functools.partial(_embedding_ranks, job) if job.model.mtp_num_layers else None,
    )


def _embedding_ranks(job: TrialJob, ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that share the embedding, as in Megatron-LM's `pretrain_gpt.py`. They are the
    first rank, the rank with multi-token prediction, and the last rank if its head is tied."""
    stages, tied = job.stage_layers, not job.model.untie_embeddings_and_output_weights
    mtp = [place % len(ranks) for place, stage in enumerate(stages) if stage.mtp] or [-1]
    return sorted({ranks[0], ranks[mtp[0]], *ranks[-1:] * tied})


def _report(job: TrialJob, built: BuiltModel, steps: list[Step], rank_device: RankDevice) -> dict[str, Any]:
    """Return the measurements of all ranks, gathered from them. Every rank returns the same report."""
    own_report = {
        "rank": dist.get_rank(),
        "parameters": _local_parameters(built),
        **rank_device.memory(),
        "own_steps": [
            {"forward_backward_s": step.own_forward_backward_s, "optimizer_s": step.own_optimizer_s} for step in steps
        ],
        SPEED_TEST: speed_test(rank_device, job.train.precision),
    }
    stage = parallel_state.get_pipeline_model_parallel_rank()
    all_reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_reports, (own_report, stage, _local_layers(built)))
    layers = {stage: count for _, stage, count in all_reports}
    layers_per_stage = [layers[stage] for stage in sorted(layers)]
    return {
        "schema_version": _SCHEMA_VERSION,
        "steps": [dataclasses.asdict(step) for step in steps],
        "num_microbatches": job.num_microbatches,
        "ranks": [rank for rank, _, _ in all_reports],
        "effective": _effective(job, built, layers_per_stage),
        "versions": _versions(job),
    }


def probe_rank(job: TrialJob, probe: Probe, import_s: float) -> None:
    """Run the rank of `probe` for `train_iters` steps, and write its measurements to `metrics.json`."""

    def join() -> None:
        init_fake_world(job.device.type, probe.rank, job.world_size)

    rank_device, built, startup = start_rank(job, probe.device, join)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    count = job.enough_microbatches(stage)
    finish = _TimedFunction(built.config.finalize_model_grads_func, rank_device)
    built.config.finalize_model_grads_func = finish
    steps = []
    for number in range(job.train.train_iters):
        batches = microbatches(job, number, rank_device.device, count)
        steps.append(_timed_step(job, built, rank_device, batches, finish))
        append_step(job.output, {"step": number, **steps[-1]})
        if number == 0:
            peaks = memory_step(job, built, rank_device, microbatches(job, 1, rank_device.device, count))
            static_bytes = rank_device.allocated_bytes()
    report = {
        "schema_version": _SCHEMA_VERSION,
        "rank": probe.rank,
        "stage": stage,
        "steps": [{"step": number, **step} for number, step in enumerate(steps)],
        "static_bytes": static_bytes,
        "peak_forward_backward_bytes": peaks[0],
        "peak_optimizer_bytes": peaks[1],
        **rank_device.memory(),
        "num_microbatches": job.num_microbatches,
        "microbatches_run": count,
        "parameters": _local_parameters(built),
        "effective": _effective(job, built, [_local_layers(built)]),
        "versions": _versions(job),
        "startup_s": {"import": import_s, "build": sum(startup.values())},
    }
    write_metrics(job.output, report)


def _timed_step(
    job: TrialJob, built: BuiltModel, rank_device: RankDevice, batches: list[Batch], finish: _TimedFunction
) -> dict[str, float]:
    """Run one step and return the seconds of the rank's own work.

    `schedule_s` is the time of the micro-batches that ran. `once_s` is the time for work that occurs once per step:
    clearing gradients, and finishing them after the last micro-batch. `compute_s` is the time of forward and backward
    for a step with all micro-batches.
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
    """A wrapper of a function that sums the seconds of all its calls."""

    def __init__(self, function: Any, rank_device: RankDevice) -> None:
        self._function, self._device = function, rank_device
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = self._device.clock()
        result = self._function(*args, **kwargs)
        self.seconds += self._device.clock() - start
        return result


def _local_parameters(built: BuiltModel) -> int:
    """Return the number of parameters on this rank, including replicas."""
    return sum(weight.numel() for chunk in built.chunks for weight in chunk.parameters())


def _local_layers(built: BuiltModel) -> int:
    """Return the number of transformer layers on this rank, over all its model chunks."""
    count = 0
    for chunk in built.chunks:
        while not hasattr(chunk, "decoder"):  # unwraps mixed precision and data parallelism
            chunk = chunk.module
        count += len(chunk.decoder.layers)
    return count


_CONFIG_NAMES = (
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "sequence_parallel"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "overlap_p2p_comm", "tp_comm_overlap"),
    *("cross_entropy_loss_fusion", "moe_grouped_gemm"),
)
_BUFFER_NAMES = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
_SIZE_NAMES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")


def _effective(job: TrialJob, built: BuiltModel, layers_per_stage: list[int]) -> dict[str, Any]:
    """Return the knob values in Megatron's model and optimizer objects, by the names of knobs in the candidate, and
    those that other distributions report for this process."""
    config, ddp_config = built.config, built.chunks[0].ddp_config
    replicas = parallel_state.get_data_parallel_world_size()
    samples = job.train.global_batch_size // (job.num_microbatches * replicas)
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunk_layers = layers_per_stage[0] // chunks if chunks else None
    split_values = {"num_layers_per_virtual_pipeline_stage": chunk_layers}
    if layout := getattr(config, "pipeline_model_parallel_layout", None):
        split_values = {"layout": str(layout)}
    return {
        "data_parallel_size": replicas,
        **{
            f"{name}_parallel_size": getattr(parallel_state, f"get_{name}_parallel_world_size")()
            for name in _SIZE_NAMES
        },
        **split_values,
        **{name: getattr(config, name) for name in _CONFIG_NAMES if hasattr(config, name)},
        **{name: getattr(ddp_config, name) for name in _BUFFER_NAMES},
        "layers_per_stage": layers_per_stage,
        "micro_batch_size": job.candidate.micro_batch_size if job.replica else samples,
        "use_recompute": config.recompute_granularity is not None,
        "recompute_modules": config.recompute_modules if config.recompute_granularity == "selective" else None,
        "precision": job.train.precision if config.fp8 else _PRECISIONS[next(built.chunks[0].parameters()).dtype],
        "fp8_recipe": config.fp8_recipe if config.fp8 else job.candidate.fp8_recipe,
        "implementation": job.train.implementation,
        "moe_token_dispatcher_type": config.moe_token_dispatcher_type if config.num_moe_experts else None,
        **_reported(),
    }


def _reported() -> dict[str, Any]:
    """Return the values of knobs that other distributions report (group `flagcore.effective`). Warns of broken ones."""
    values = dict[str, Any]()
    for points in installed("flagcore.effective").values():
        try:
            values |= load_checked("report of knobs", points, lambda report: instance_of(dict, report()))
        except NoDevice as error:
            LOG.warning("%s", error)
    return values


def _versions(job: TrialJob) -> dict[str, str]:
    """Return the versions of the software in the trial."""
    extra = {"transformer-engine": version("transformer-engine")} if job.transformer_engine else {}
    return {
        "torch": str(torch.__version__),
        "megatron-core": str(megatron.core.__version__),
        "python": platform.python_version(),
        **extra,
    }
