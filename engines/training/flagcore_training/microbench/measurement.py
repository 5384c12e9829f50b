"""One process of the benchmark: it joins the others, measures, and writes the results.

Collectives run among 2, 4, 8, ... neighbouring devices. All groups run at the same time, as in training.
"""

import json
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flagcore_training.microbench import BenchmarkJob, kernels
from flagcore_training.microbench.kernels import Bench, Item
from flagcore_training.trial.rank_device import join_group

SHARES = {
    "gemm": 0.35,
    "attention": 0.1,
    "attention_backward": 0.1,
    "memory": 0.1,
    "host_copy": 0.03,
    "collectives": 0.3,
}
"""Share of the time limit for each kind of kernel."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
BYTES = tuple(2.0**power for power in range(10, 29, 2))
WORK_SIDE = 384
MIN_GRADIENT_BYTES = 4 << 20
"""Tensors of at least this size are measured in fp32, like gradients; smaller ones in bf16, like activations."""


def measure(job: BenchmarkJob, number: int, listener: socket.socket) -> None:
    """Measure in the process with the index `number`.

    The processes connect through `listener`, and process 0 writes the output.
    """
    start = time.perf_counter()
    if job.shared:
        torch.set_num_threads(job.threads)
    bench = Bench(job.kind, number, job.devices > 1)
    if job.devices > 1:
        join_group(job.backend, number, job.devices, listener)
    scale = job.seconds - bench.agree(time.perf_counter() - start) - 1.0
    if job.devices == 1:
        scale /= 1.0 - SHARES["collectives"]
    rows = _kernels(bench, job, scale)
    if job.devices > 1:
        rows += _collectives(bench, job, scale * SHARES["collectives"])
    if number == 0:
        results = {"torch": torch.__version__, "seconds": time.perf_counter() - start, "rows": rows}
        job.output.write_text(json.dumps(results), encoding="utf-8")
    if job.devices > 1:
        dist.barrier()
        dist.destroy_process_group()


def _kernels(bench: Bench, job: BenchmarkJob, seconds: float) -> list[dict[str, Any]]:
    main = [name for name in ("bf16", "fp32") if name in job.precisions] or ["fp32"]
    items = {
        "memory": [kernels.memory(bench, job, main[0])],
        "host_copy": [kernels.host_copies(bench)],
        "attention": [kernels.attentions(bench, job, name, backward=False) for name in main],
        "attention_backward": [kernels.attentions(bench, job, name, backward=True) for name in main],
        "gemm": [kernels.gemms(bench, job, name) for name in _precisions(bench, job)],
    }
    rows = kernels.launches(bench)
    for kind, lists in items.items():
        for each in lists:
            rows += kernels.measured(bench, each, seconds * SHARES[kind] / len(lists))
    return rows


def _precisions(bench: Bench, job: BenchmarkJob) -> list[str]:
    """Return the precisions to measure. If a chip supports bf16, fp16 is omitted; a CPU has neither tf32 nor fp8."""
    left_out = {"fp16"} if "bf16" in job.precisions else set()
    left_out |= {"tf32", "fp8"} if bench.cpu else set()
    names = ("bf16", "fp16", "fp32", "tf32", "fp8")
    return [name for name in names if name in job.precisions and name not in left_out] or ["fp32"]


def _collectives(bench: Bench, job: BenchmarkJob, seconds: float) -> list[dict[str, Any]]:
    """Measure groups of all devices, and of powers of two that divide their number."""
    rows: list[dict[str, Any]] = []
    divisors = (2**power for power in range(1, 12) if job.devices % 2**power == 0)
    groups = sorted({*divisors, job.devices}) if job.devices > 1 else []
    for ranks in groups:
        items = collective_items(bench, job.devices, ranks, job.memory_bytes / 16)
        work = 0.0
        if job.shared:
            items = between_kernels(items)
            work = bench.time(compute_call(), 0.02 * seconds, alone=False).seconds
        for row in kernels.measured(bench, items, seconds / len(groups), alone=False):
            rows.append(row | {"us": max(row["us"] - 1e6 * work, 0.1 * row["us"])})
    return rows


def collective_items(bench: Bench, devices: int, ranks: int, max_bytes: float) -> list[Item]:
    """Return all collectives among `ranks` devices with tensors of up to `max_bytes` bytes, as items to measure."""
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, devices, ranks)]
    group = groups[dist.get_rank() // ranks]
    items = []
    for kind in KINDS:
        if kind != "send" or ranks == 2:
            for size in (size for size in BYTES if size <= max_bytes):
                row = {"collective": kind, "ranks": ranks, "bytes": int(size)}
                make = partial(collective_call, kind, int(size), ranks, group, bench.device)
                items.append(Item(row, size * ranks, make))
    return items


def between_kernels(items: list[Item]) -> list[Item]:
    """Return `items` with a `compute_call` before each collective.

    In a training step, compute precedes each collective, so that ranks do not enter it at the same time.
    """

    def make_both(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        compute, communicate = compute_call(), make()
        return lambda: (compute(), communicate())

    return [Item(item.row, item.work, partial(make_both, item.make)) for item in items]


def compute_call() -> Callable[[], object]:
    """Return a call that keeps a core busy for about a millisecond."""
    side = torch.ones(WORK_SIDE, WORK_SIDE)
    return lambda: torch.mm(side, side)


def collective_call(
    kind: str,
    size: int,
    ranks: int,
    group: Any,
    device: torch.device,
    fill: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
) -> Callable[[], torch.Tensor]:
    """Return a call of the collective `kind`, which returns its result. The tensor has `size` bytes over all ranks.

    `fill` returns the values of an input.
    """
    dtype = torch.bfloat16 if size < MIN_GRADIENT_BYTES else torch.float32
    count = max(size // dtype.itemsize, ranks) // ranks * ranks
    whole, shard = (fill(torch.empty(each, dtype=dtype, device=device)) for each in (count, count // ranks))
    run: Callable[[], object] = partial(dist.all_reduce, whole, group=group)
    result = whole
    if kind == "all_gather":
        run = partial(dist.all_gather_into_tensor, whole, shard, group=group)
    elif kind == "reduce_scatter":
        run, result = partial(dist.reduce_scatter_tensor, shard, whole, group=group), shard
    elif kind == "all_to_all":
        result = torch.zeros_like(whole)
        run = partial(dist.all_to_all_single, result, whole, group=group)
    elif kind == "send":
        run = _half_round_trip(whole, group)

    def call() -> torch.Tensor:
        run()
        return result

    return call


def _half_round_trip(whole: torch.Tensor, group: Any) -> Callable[[], object]:
    """Return a call that sends the tensor `whole` to the other rank of the group.

    The direction alternates from call to call.
    """
    rank, first = dist.get_rank(), dist.get_global_rank(group, 0)
    peer, state = dist.get_global_rank(group, 1) if rank == first else first, {"sends": rank == first}

    def message() -> None:
        operation = dist.isend if state["sends"] else dist.irecv
        state["sends"] = not state["sends"]
        for work in dist.batch_isend_irecv([dist.P2POp(operation, whole, peer, group)]):
            work.wait()

    return message
