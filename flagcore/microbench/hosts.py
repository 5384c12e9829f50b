"""Compares hosts: `python -m flagcore.microbench.hosts JOB RANK HOSTS ADDRESS PORT`, started once on each.

JOB is JSON with `kind`, `backend`, `preload` and `devices`. Prints the seconds of one product on each device, and of an
all-reduce with each neighbour.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flagcore.microbench.bench import Bench

SIZES = {"cpu": 512}
ACCELERATORS_SIZE = 4096
"""Rows and columns of the product."""
PRODUCT_SECONDS = 0.1
LINK_BYTES = 4 << 20
ROUNDS = 5
TIMEOUT = timedelta(seconds=60)


def main(job: dict[str, Any], rank: int, hosts: int, address: str, port: str) -> None:
    """Measure as host `rank` of `hosts`, which meet at `address`."""
    for name in job["preload"]:
        importlib.import_module(name)
    torch.set_num_threads(1)
    Bench(job["kind"], 0, several=False)  # selects the device of the collectives
    if hosts > 1:
        meeting = f"tcp://{address}:{port}"
        dist.init_process_group(job["backend"], meeting, rank=rank, world_size=hosts, timeout=TIMEOUT)
        dist.barrier()
    products = [_product(Bench(job["kind"], number, several=False)) for number in range(job["devices"])]
    bench = Bench(job["kind"], 0, several=hosts > 1)
    links = _links(bench, rank, hosts) if hosts > 1 else {}
    print(json.dumps({"products_s": products, "links_s": links}), flush=True)
    if hosts > 1:
        dist.barrier()


def _product(bench: Bench) -> float:
    size = SIZES.get(bench.device.type, ACCELERATORS_SIZE)
    dtype = torch.float32 if bench.cpu else torch.bfloat16
    left = torch.ones(size, size, dtype=dtype, device=bench.device)
    return bench.time(lambda: torch.mm(left, left), PRODUCT_SECONDS).seconds


def _links(bench: Bench, rank: int, hosts: int) -> dict[int, float]:
    """Return the seconds of an all-reduce with each neighbour, by its rank. Neighbours are pairs of a ring."""
    pairs = [(first, (first + 1) % hosts) for first in range(hosts if hosts > 2 else 1)]
    groups = [dist.new_group(sorted(pair)) for pair in pairs]
    data, found = torch.zeros(LINK_BYTES // 4, device=bench.device), {}
    turns = (pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]) if hosts > 2 else (pairs,)
    for turn in turns:  # no host is in two pairs of a turn
        for pair, group in zip(pairs, groups, strict=True):
            if pair in turn and rank in pair:
                (other,) = set(pair) - {rank}
                found[other] = _fastest(bench, partial(dist.all_reduce, data, group=group))
        dist.barrier()
    return found


def _fastest(bench: Bench, call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(ROUNDS):
        bench.synchronize()
        start = time.perf_counter()
        call()
        bench.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)
