"""The training loop of a trial on generated tokens. Each step is timed between two barriers of all ranks.

The global batch of a step depends only on the seed and the step, so it is the same in every layout.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flagcore.domain.steps import MIN_STEPS, steps_in_time
from flagcore_training.trial.job import Train, TrainingJob
from flagcore_training.trial.rank_device import RankDevice

Batches = TypeVar("Batches")
Losses = TypeVar("Losses")

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


def timed_steps(
    job: TrainingJob,
    rank_device: RankDevice,
    optimizer: Any,
    *,
    batches: Callable[[int], Batches],
    forward_backward: Callable[[Batches], Losses],
    update: Callable[[], Any],
    loss_sums: Callable[[Losses], torch.Tensor],
    memory_step: Callable[[Batches], object],
) -> Iterator[Step]:
    """Run `train_iters` steps and yield each step when it ends. All ranks must call this together.

    `batches`: returns this rank's micro-batches of a step.
    `forward_backward`: returns the losses, which only exist on the last pipeline stage.
    `update`: runs the optimizer, and returns the norm of the gradients, or None.
    `loss_sums`: returns the weighted sum of losses and the sum of their weights.
    `memory_step`: runs an additional step after the first one if the device needs it to measure the peak of memory.

    If the steps would not end before `job.ends_at`, there are fewer of them, but at least MIN_STEPS.
    """
    number, planned, times, clock = 0, job.train.train_iters, list[float](), rank_device.clock
    initial = _checksum(optimizer)
    while number < planned:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE if number else 0.0
        batch = batches(number)
        start, own_start = _synchronize(rank_device), clock()
        losses = forward_backward(batch)
        rank_device.synchronize()
        backward_end, own_backward_end = time.perf_counter(), clock()
        norm = update()
        rank_device.synchronize()
        optimizer_end, own_end = time.perf_counter(), clock()
        times.append(_synchronize(rank_device) - start)
        if job.ends_at is not None and len(times) >= MIN_STEPS:
            planned = steps_in_time(times, planned, job.ends_at - time.monotonic())
        # All ranks take the number of steps that rank 0 plans.
        own = torch.tensor([float(planned * (dist.get_rank() == 0))], device=rank_device.device)
        total = torch.cat((loss_sums(losses), own))
        dist.all_reduce(total)
        planned = int(total[2])
        yield Step(
            step=number,
            step_time_s=times[-1],
            forward_backward_s=backward_end - start,
            optimizer_s=optimizer_end - backward_end,
            own_forward_backward_s=own_backward_end - own_start,
            own_optimizer_s=own_end - own_backward_end,
            loss=_if_finite(total[0] / total[1]),
            grad_norm=_if_finite(norm),
        )
        if number == 0 and rank_device.needs_memory_step:
            memory_step(batch)
        number += 1
    if number > 1 and _checksum(optimizer) == initial != 0.0:  # the first step has a learning rate of 0
        raise RuntimeError(f"wrong answers: the parameters of rank {dist.get_rank()} stay constant in {number} steps")


def _checksum(optimizer: Any) -> float:
    """Return the sum of the parameters that the optimizer of this rank changes."""
    groups = optimizer.param_groups
    return math.fsum(float(each.detach().sum(dtype=torch.float64)) for group in groups for each in group["params"])


def _synchronize(rank_device: RankDevice) -> float:
    """Wait for the device and for all ranks, and return the current time."""
    rank_device.synchronize()
    dist.barrier()
    return time.perf_counter()


def _if_finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def token_rows(train: Train, vocabulary: int, first: int, count: int) -> torch.Tensor:
    """Return the sequences `first` to `first + count - 1` of seq_length + 1 tokens, numbered over all steps.

    The second step has those of the first one in the opposite order: see `flagcore_training.reading`.

    Small tokens are more frequent, so the loss can decrease.
    """
    rows = []
    for number in range(first, first + count):
        if number // train.global_batch_size == 1:
            number = 2 * train.global_batch_size - 1 - number
        generator = torch.Generator().manual_seed(((train.seed << 32) + number) % 2**63)
        share = torch.rand(train.seq_length + 1, generator=generator) ** 3
        rows.append((share * vocabulary).long().clamp_(max=vocabulary - 1))
    return torch.stack(rows)
