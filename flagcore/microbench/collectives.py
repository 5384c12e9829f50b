"""Collectives among 2, 4, 8, ... neighbouring devices. All groups run at the same time, as in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flagcore.microbench.bench import Bench
from flagcore.microbench.kernels import Item

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
BYTES = tuple(2.0**power for power in range(10, 29, 2))
WORK_SIDE = 384
MIN_GRADIENT_BYTES = 4 << 20
"""Tensors of at least this size are in fp32, like gradients; smaller ones are in bf16, like activations."""


def sizes(devices: int) -> tuple[int, ...]:
    """Return the group sizes to measure: the number of devices, and the powers of two that divide it."""
    return tuple(
        sorted({2**power for power in range(1, 12) if devices % 2**power == 0} | {devices}) if devices > 1 else ()
    )


def collectives(bench: Bench, devices: int, ranks: int, max_bytes: float) -> list[Item]:
    """Return all collectives among `ranks` devices with tensors of up to `max_bytes` bytes."""
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, devices, ranks)]
    group = groups[dist.get_rank() // ranks]
    items = []
    for kind in KINDS:
        if kind != "send" or ranks == 2:
            for size in (size for size in BYTES if size <= max_bytes):
                row = {"collective": kind, "ranks": ranks, "bytes": int(size)}
                items.append(Item(row, size * ranks, partial(call, kind, int(size), ranks, group, bench.device)))
    return items


def between_kernels(items: list[Item]) -> list[Item]:
    """Return `items` with `work` before each call, because ranks start late if compute and communication alternate."""

    def after_work(make: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
        def make_both() -> Callable[[], object]:
            compute, communicate = work(), make()
            return lambda: (compute(), communicate())

        return make_both

    return [Item(item.row, item.work, after_work(item.make)) for item in items]


def work() -> Callable[[], object]:
    """Return a call that keeps a core busy for about a millisecond."""
    side = torch.ones(WORK_SIDE, WORK_SIDE)
    return lambda: torch.mm(side, side)


def call(kind: str, size: int, ranks: int, group: Any, device: torch.device) -> Callable[[], object]:
    """Return a call of a collective whose whole tensor has `size` bytes."""
    dtype = torch.bfloat16 if size < MIN_GRADIENT_BYTES else torch.float32
    buffer = torch.zeros(max(size // dtype.itemsize, ranks) // ranks * ranks, dtype=dtype, device=device)
    part = torch.zeros(buffer.numel() // ranks, dtype=dtype, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(buffer, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(buffer, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, buffer, group=group)
    if kind == "all_to_all":
        other = torch.zeros_like(buffer)
        return lambda: dist.all_to_all_single(other, buffer, group=group)
    return _half_round_trip(buffer, group)


def _half_round_trip(whole: torch.Tensor, group: Any) -> Callable[[], object]:
    """Return a call that sends a message, in alternating directions."""
    rank, first = dist.get_rank(), dist.get_global_rank(group, 0)
    peer, state = dist.get_global_rank(group, 1) if rank == first else first, {"sends": rank == first}

    def message() -> None:
        operation = dist.isend if state["sends"] else dist.irecv
        state["sends"] = not state["sends"]
        for work in dist.batch_isend_irecv([dist.P2POp(operation, whole, peer, group)]):
            work.wait()

    return message
