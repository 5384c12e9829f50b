"""The training loop on generated tokens. Each step is timed between two barriers of all ranks.

The global batch of a step depends only on the seed and the step, so it is the same in every layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from flagcore_training.trial.rank_device import RankDevice
from megatron.core import parallel_state as groups
from megatron.core.pipeline_parallel import get_forward_backward_func

from flagcore.domain.trial import MIN_STEPS, steps_in_time
from flagcore_megatron.trial.job import TrialJob
from flagcore_megatron.trial.model import BuiltModel

LEARNING_RATE = 1e-3
"""The learning rate from the second step on.

It is 0 in the first step, so that memory is measured with initial weights: after one step on a single batch, a router
would send most tokens to a few experts."""


@dataclass(frozen=True)
class Step:
    """One training step on this rank. Times are wall times in seconds.

    `step_time_s` is the time between two barriers of all ranks. The `own` times are measured with `RankDevice.clock`.
    `loss` is the mean over the global batch, or None if it is not finite. `grad_norm` is None if fp16 overflowed.
    """

    step: int
    step_time_s: float
    forward_backward_s: float
    optimizer_s: float
    own_forward_backward_s: float
    own_optimizer_s: float
    loss: float | None
    grad_norm: float | None


def train(job: TrialJob, built: BuiltModel, rank_device: RankDevice) -> Iterator[Step]:
    """Run `train_iters` steps and yield each step when it ends. All ranks must call this together.

    If the steps would not end before `job.ends_at`, there are fewer of them, but at least MIN_STEPS.
    """
    number, planned, times = 0, job.train.train_iters, list[float]()
    while number < planned:
        for group in built.optimizer.param_groups:
            group["lr"] = LEARNING_RATE if number else 0.0
        batches = microbatches(job, number, rank_device.device, job.num_microbatches)
        start = _synchronize(rank_device)
        own_start = rank_device.clock()
        clear_gradients(built)
        losses = forward_backward(job, built, batches)
        rank_device.synchronize()
        backward_end, own_backward_end = time.perf_counter(), rank_device.clock()
        _, grad_norm, _ = built.optimizer.step()
        rank_device.synchronize()
        optimizer_end, own_end = time.perf_counter(), rank_device.clock()
        end = _synchronize(rank_device)
        times.append(end - start)
        loss, planned = _agree(job, losses, _steps_in_time(job, times, planned), rank_device.device)
        yield Step(
            step=number,
            step_time_s=times[-1],
            forward_backward_s=backward_end - start,
            optimizer_s=optimizer_end - backward_end,
            own_forward_backward_s=own_backward_end - own_start,
            own_optimizer_s=own_end - own_backward_end,
            loss=_float_if_finite(loss),
            grad_norm=_float_if_finite(grad_norm),
        )
        if number == 0 and rank_device.needs_memory_step:
            memory_step(job, built, rank_device, batches)
        number += 1


def _steps_in_time(job: TrialJob, times: list[float], planned: int) -> int:
    """Return how many of the `planned` steps end before `job.ends_at`, estimated from the `times` of finished steps."""
    if job.ends_at is None or len(times) < MIN_STEPS:
        return planned
    return steps_in_time(times, planned, job.ends_at - time.monotonic())


def memory_step(job: TrialJob, built: BuiltModel, rank_device: RankDevice, batches: list[Batch]) -> tuple[int, int]:
    """Run an additional step to measure memory. Return the peaks of forward and backward, and of the optimizer."""
    rank_device.start_peak()
    clear_gradients(built)
    forward_backward(job, built, batches)
    rank_device.synchronize()
    forward_backward_peak = rank_device.peak_bytes()
    rank_device.start_peak()
    built.optimizer.step()
    rank_device.synchronize()
    optimizer_peak = rank_device.peak_bytes()
    rank_device.end_memory_measurement(max(forward_backward_peak, optimizer_peak))
    return forward_backward_peak, optimizer_peak


def clear_gradients(built: BuiltModel) -> None:
    """Set gradients to zero before a step."""
    for chunk in built.chunks:
        chunk.zero_grad_buffer()
    built.optimizer.zero_grad()


def forward_backward(job: TrialJob, built: BuiltModel, batches: list[Batch]) -> list[dict[str, torch.Tensor]]:
    """Run Megatron's schedule over `batches`. Return the losses, which only exist on the last pipeline stage."""
    losses: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, weight=job.replica.weight if job.replica else 1.0),
        data_iterator=_for_schedule([iter(batches) for _ in built.chunks]),
        model=_for_schedule(built.chunks),
        num_microbatches=len(batches),
        seq_length=job.train.seq_length,
        micro_batch_size=job.candidate.micro_batch_size,
        forward_only=False,
    )
    return losses


def _synchronize(rank_device: RankDevice) -> float:
    """Wait for the device and for all ranks, and return the current time."""
    rank_device.synchronize()
    dist.barrier()
    return time.perf_counter()


def _for_schedule(items: list[Any]) -> Any:
    """Return `items` for the interleaved schedule, which takes lists, or the only item for other schedules."""
    return items if groups.get_virtual_pipeline_model_parallel_world_size() else items[0]


def _forward_step(batches: Iterator[Batch], model: Any, *, weight: float) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(batches)
    return model(batch.tokens, batch.positions, None, labels=batch.labels), partial(_loss, weight=weight)


def _loss(token_losses: torch.Tensor, weight: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weighted mean loss over this rank's tokens of one micro-batch, and the mean as `loss`.

    The schedule multiplies the loss by the context-parallel size and divides it by the replica's number of
    micro-batches in place, so the reported mean is a clone.
    """
    loss = token_losses.float().mean()
    return weight * loss / groups.get_context_parallel_world_size(), {"loss": loss.detach().clone()}


def _agree(
    job: TrialJob, losses: list[dict[str, torch.Tensor]], planned: int, device: torch.device
) -> tuple[float, int]:
    """Return the mean loss of the global batch, and the number of steps that rank 0 plans, on all ranks. Only the last
    pipeline stage computed the loss."""
    total, samples = torch.zeros(3, device=device), job.candidate.micro_batch_size if job.replica else 1
    for loss in losses:
        total[0] += loss["loss"] * samples
        total[1] += samples
    total[2] = planned if dist.get_rank() == 0 else 0
    dist.all_reduce(total)
    return float(total[0] / total[1]), int(total[2])


def _float_if_finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Batch:
    """One micro-batch on this rank. Shape of its tensors: [micro_batch_size, seq_length / context_parallel_size]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


def microbatches(job: TrialJob, step: int, device: torch.device, count: int) -> list[Batch]:
    """Return this rank's first `count` micro-batches of one step, on its device."""
    size = job.candidate.micro_batch_size
    replicas, replica = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
    batches = []
    for index in range(count):
        first = job.replica.first_sample + index * size if job.replica else (index * replicas + replica) * size
        rows = torch.stack([_token_row(job, step, row) for row in range(first, first + size)])
        positions = torch.arange(job.train.seq_length).expand(size, -1)
        parts = (_own_chunks(part).to(device) for part in (rows[:, :-1], rows[:, 1:], positions))
        batches.append(Batch(*parts))
    return batches


def _token_row(job: TrialJob, step: int, row: int) -> torch.Tensor:
    """Return one sequence of seq_length + 1 tokens. Small token ids are more frequent, so the loss can decrease."""
    number = step * job.train.global_batch_size + row
    generator = torch.Generator().manual_seed(((job.train.seed << 32) + number) % 2**63)
    share = torch.rand(job.train.seq_length + 1, generator=generator) ** 3
    return (share * job.model.vocab_size).long().clamp_(max=job.model.vocab_size - 1)


def _own_chunks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the chunks r and 2n-1-r of the 2n chunks of each sequence, for context-parallel rank r of n."""
    size, rank = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()
    if size == 1:
        return tensor.contiguous()
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)
