"""What a step of the training loop does with megatron-core: its micro-batches, and its forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from flagcore_training.trial.rank_device import RankDevice
from flagcore_training.trial.steps import Step, timed_steps, token_rows
from megatron.core import parallel_state as groups
from megatron.core.pipeline_parallel import get_forward_backward_func

from flagcore_megatron.trial.job import TrialJob
from flagcore_megatron.trial.model import BuiltModel, own_positions


def train(job: TrialJob, built: BuiltModel, rank_device: RankDevice) -> Iterator[Step]:
    """Run the steps of a trial, and yield each step when it ends. All ranks must call this together."""

    def run(batches: list[Batch]) -> list[dict[str, torch.Tensor]]:
        clear_gradients(built)
        return forward_backward(job, built, batches)

    return timed_steps(
        job,
        rank_device,
        built.optimizer,
        batches=lambda number: microbatches(job, number, rank_device.device, job.num_microbatches),
        forward_backward=run,
        update=lambda: built.optimizer.step()[1],
        loss_sums=lambda losses: _loss_sums(job, losses, rank_device.device),
        memory_step=lambda batches: memory_step(job, built, rank_device, batches),
    )


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


def _loss_sums(job: TrialJob, losses: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Return the sum of the losses of all samples, and their number. Only the last pipeline stage computed losses."""
    total, samples = torch.zeros(2, device=device), job.candidate.micro_batch_size if job.replica else 1
    for loss in losses:
        total[0] += loss["loss"] * samples
        total[1] += samples
    return total


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
    length, batch = job.train.seq_length, job.train.global_batch_size
    context = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()
    positions, batches = own_positions(length, *context), []
    for index in range(count):
        first = job.replica.first_sample + index * size if job.replica else (index * replicas + replica) * size
        rows = token_rows(job.train, job.model.vocab_size, step * batch + first, size)
        parts = (rows[:, positions], rows[:, positions + 1], positions.repeat(size, 1))
        batches.append(Batch(*(part.to(device) for part in parts)))
    return batches
