"""The speed test of a device: a fixed matrix product on all ranks at once, without communication."""

from __future__ import annotations

import time
from contextlib import suppress

import torch
import torch.distributed as dist

from flagcore.engines.megatron.trial.device import RankDevice
from flagcore.engines.megatron.trial.job import Job

SIZE, PRODUCTS, ROUNDS = {"cpu": 256}, 8, 4
ACCELERATORS_SIZE = 4096
"""Rows and columns of the product: some 30 ms of a core or of an accelerator in all."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def speed_test(job: Job, rank_device: RankDevice) -> float | None:
    """Return the seconds of some equal products, the fastest of several rounds, in wall time of this rank.

    All ranks start together, so that devices share power, cooling and cores as in a step. It runs after the steps and
    after memory is read, so it changes no other figure. None if the device has not enough memory left.
    """
    size = SIZE.get(job.device.type, ACCELERATORS_SIZE)
    dtype = torch.float32 if job.device.type == "cpu" else _DTYPES[job.train.precision]
    ready = False
    with suppress(RuntimeError):  # out of memory must not fail a finished trial
        left = torch.ones(size, size, dtype=dtype, device=rank_device.device)
        out = torch.empty_like(left)
        torch.mm(left, left, out=out)
        ready = True
    best = float("inf")
    for _ in range(ROUNDS):
        rank_device.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PRODUCTS if ready else 0):
            torch.mm(left, left, out=out)
        rank_device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best if ready else None
