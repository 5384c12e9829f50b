"""One process: join the others, measure, and write the results."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flagcore.microbench import collectives, kernels
from flagcore.microbench.bench import Bench
from flagcore.microbench.job import Job

TIMEOUT = timedelta(minutes=5)

SHARES = {
    "gemm": 0.35,
    "attention": 0.1,
    "attention_backward": 0.1,
    "memory": 0.1,
    "host_copy": 0.03,
    "collectives": 0.3,
}
"""The share of the time for each kind of kernel."""


def measure(job: Job, number: int, listener: socket.socket) -> None:
    """Measure in the process `number`. The processes connect through `listener`, and process 0 writes the output."""
    start = time.perf_counter()
    if job.shared:
        torch.set_num_threads(job.threads)
    bench = Bench(job.kind, number, job.devices > 1)
    if job.devices > 1:
        _join(job, number, listener)
    scale = job.seconds - bench.agree(time.perf_counter() - start) - 1.0
    if job.devices == 1:
        scale /= 1.0 - SHARES["collectives"]
    rows = _kernels(bench, job, scale)
    if job.devices > 1:
        rows += _collectives(bench, job, scale * SHARES["collectives"])
    if number == 0:
        _write(job, rows, time.perf_counter() - start)
    if job.devices > 1:
        dist.barrier()
        dist.destroy_process_group()


def _kernels(bench: Bench, job: Job, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    usual: list[str] = [name for name in ("bf16", "fp32") if name in job.precisions]
    main = tuple(usual) or ("fp32",)
    rows += kernels.launches(bench)
    rows += kernels.measured(bench, kernels.memory(bench, job, main[0]), seconds * SHARES["memory"])
    rows += kernels.measured(bench, kernels.host_copies(bench), seconds * SHARES["host_copy"])
    for backward, kind in ((False, "attention"), (True, "attention_backward")):
        for precision in main:
            items = kernels.attentions(bench, job, precision, backward=backward)
            rows += kernels.measured(bench, items, seconds * SHARES[kind] / len(main))
    precisions = _precisions(bench, job)
    for precision in precisions:
        items = kernels.gemms(bench, job, precision)
        rows += kernels.measured(bench, items, seconds * SHARES["gemm"] / len(precisions))
    return rows


def _precisions(bench: Bench, job: Job) -> tuple[str, ...]:
    """Return the precisions to measure. If a chip has bf16, fp16 is left out; a CPU has neither tf32 nor fp8."""
    known = [name for name in ("bf16", "fp16", "fp32", "tf32", "fp8") if name in job.precisions]
    if "bf16" in known and "fp16" in known:
        known.remove("fp16")
    if bench.cpu:
        known = [name for name in known if name not in ("tf32", "fp8")]
    return tuple(known) or ("fp32",)


def _collectives(bench: Bench, job: Job, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    groups = collectives.sizes(job.devices)
    for ranks in groups:
        items = collectives.collectives(bench, job.devices, ranks, job.memory_bytes / 16)
        work = 0.0
        if job.shared:
            items = collectives.between_kernels(items)
            work = bench.time(collectives.work(), 0.02 * seconds, alone=False).seconds
        for row in kernels.measured(bench, items, seconds / len(groups), alone=False):
            rows.append(row | {"us": max(row["us"] - 1e6 * work, 0.1 * row["us"])})
    return rows


def _join(job: Job, number: int, listener: socket.socket) -> None:
    host, port = listener.getsockname()
    if job.backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the name of this host
    store = dist.TCPStore(
        host,
        port,
        job.devices,
        is_master=number == 0,
        timeout=TIMEOUT,
        master_listen_fd=os.dup(listener.fileno()) if number == 0 else None,
    )
    dist.init_process_group(job.backend, store=store, rank=number, world_size=job.devices, timeout=TIMEOUT)


def _write(job: Job, rows: list[dict[str, Any]], seconds: float) -> None:
    found = {"torch": torch.__version__, "seconds": seconds, "rows": rows}
    job.output.write_text(json.dumps(found), encoding="utf-8")
