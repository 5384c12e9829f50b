"""Generated tokens. The global batch of a step is the same in every layout: it depends on seed and step alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as groups

from flagcore.engines.megatron.trial.job import Job


@dataclass(frozen=True)
class Batch:
    """One micro-batch of this rank: three [micro_batch_size, seq_length / context_parallel_size] tensors."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


def microbatches(job: Job, step: int, device: torch.device, count: int) -> list[Batch]:
    """Return this rank's first `count` micro-batches of one step, on its device."""
    size = job.candidate.micro_batch_size
    copies, copy = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
    batches = []
    for index in range(count):
        first = (index * copies + copy) * size
        rows = torch.stack([_row(job, step, row) for row in range(first, first + size)])
        positions = torch.arange(job.train.seq_length).expand(size, -1)
        parts = (_own_chunks(part).to(device) for part in (rows[:, :-1], rows[:, 1:], positions))
        batches.append(Batch(*parts))
    return batches


def repeat_for_chunks(batches: list[Batch], chunks: int) -> list[Iterator[Batch]]:
    """Return one iterator for each model chunk of this rank, as the interleaved schedule requires."""
    return [iter(batches) for _ in range(chunks)]


def _row(job: Job, step: int, row: int) -> torch.Tensor:
    """One sequence of seq_length + 1 tokens. Small tokens are more frequent, so that the model can learn."""
    number = step * job.train.global_batch_size + row
    generator = torch.Generator().manual_seed(((job.train.seed << 32) + number) % 2**63)
    share = torch.rand(job.train.seq_length + 1, generator=generator) ** 3
    return (share * job.model.vocab_size).long().clamp_(max=job.model.vocab_size - 1)


def _own_chunks(tensor: torch.Tensor) -> torch.Tensor:
    """Keep this context-parallel rank's two of the 2n chunks of each sequence: the r-th and the r-th last."""
    size, rank = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()
    if size == 1:
        return tensor.contiguous()
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)
