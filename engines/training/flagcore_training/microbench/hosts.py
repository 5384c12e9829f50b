"""Compares the hosts of a cluster by the speed of their devices and links.

`python -m flagcore_training.microbench.hosts JOB RANK HOSTS ADDRESS PORT` is started once on each host. JOB is JSON
with `kind`, `backend`, `preload` and `devices`. The program prints the seconds of a matrix product on each device, and
the figures of the link to each neighbouring host.
"""

import json
import sys
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from flagcore_training.microbench.kernels import Bench
from flagcore_training.trial.forked_ranks import exit_at_once, import_all

CPU_SIZE, ACCELERATOR_SIZE = 512, 4096
"""Numbers of rows and columns of the matrix product on a CPU and on an accelerator."""
PRODUCT_SECONDS = 0.1
LINK_BYTES, ACCELERATOR_LINK_BYTES = 4 << 20, 64 << 20
"""Sizes of the messages between CPUs, and of those between accelerators, whose networks are faster."""
ROUNDS = 5
TIMEOUT = timedelta(seconds=60)


def main(job: dict[str, Any], rank: int, hosts: int, address: str, port: str) -> None:
    """Measure and print the speed of the host with the index `rank` of `hosts` hosts.

    `address` is the address of host 0, on which the hosts connect at `port`.
    """
    import_all(*job["preload"])
    torch.set_num_threads(1)
    Bench(job["kind"], 0, is_distributed=False)  # its constructor selects the device of the collectives
    if hosts > 1:
        url = f"tcp://{address}:{port}"
        dist.init_process_group(job["backend"], url, rank=rank, world_size=hosts, timeout=TIMEOUT)
        dist.barrier()
    products = [_product(Bench(job["kind"], number, is_distributed=False)) for number in range(job["devices"])]
    bench = Bench(job["kind"], 0, is_distributed=hosts > 1)
    links = _links(bench, rank, hosts) if hosts > 1 else {}
    print(json.dumps({"products_s": products, "links": links}), flush=True)
    if hosts > 1:
        dist.barrier()


def _product(bench: Bench) -> float:
    size = CPU_SIZE if bench.cpu else ACCELERATOR_SIZE
    dtype = torch.float32 if bench.cpu else torch.bfloat16
    matrix = torch.ones(size, size, dtype=dtype, device=bench.device)
    return bench.time(lambda: torch.mm(matrix, matrix), PRODUCT_SECONDS).seconds


def _links(bench: Bench, rank: int, hosts: int) -> dict[int, dict[str, float]]:
    """Return the figures of the link to each neighbour in a ring of hosts, by the rank of the neighbour.

    `all_reduce_s`: an all-reduce of LINK_BYTES. `latency_s`: a small message. `bytes_per_second`: a large message from
    one device, in one direction.
    """
    pairs = [(first, (first + 1) % hosts) for first in range(hosts if hosts > 2 else 1)]
    groups = [dist.new_group(sorted(pair)) for pair in pairs]
    data, links = torch.zeros(LINK_BYTES // 4, device=bench.device), {}
    rounds = (pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]) if hosts > 2 else (pairs,)
    for round_pairs in rounds:  # in a round, each host is in at most one pair
        for pair, group in zip(pairs, groups, strict=True):
            if pair in round_pairs and rank in pair:
                (other,) = set(pair) - {rank}
                call = partial(dist.all_reduce, data, group=group)
                call()
                all_reduce_s = min(bench.seconds_of(call) for _ in range(ROUNDS))
                links[other] = {"all_reduce_s": all_reduce_s, **_messages(bench, rank, other, group)}
        dist.barrier()
    return links


def _messages(bench: Bench, rank: int, other: int, group: Any) -> dict[str, float]:
    """Return the latency and the rate of messages between two hosts, as the host with the lower rank measures them.

    The time of a large message with a small answer, less that of two small messages, is the time of its bytes.
    """
    first, size = min(rank, other), LINK_BYTES if bench.cpu else ACCELERATOR_LINK_BYTES
    answer = torch.zeros(1, device=bench.device)
    seconds = []
    for count in (1, size // 4):
        data = torch.zeros(count, device=bench.device)
        messages = (
            ((dist.send, data), (dist.recv, answer)) if rank == first else ((dist.recv, data), (dist.send, answer))
        )

        def there_and_back(messages: Any = messages) -> None:
            for call, tensor in messages:
                call(tensor, other, group)

        there_and_back()
        seconds.append(min(bench.seconds_of(there_and_back) for _ in range(ROUNDS)))
    of_first = torch.tensor(seconds, device=bench.device)
    dist.broadcast(of_first, first, group)
    small_s, large_s = of_first.tolist()
    return {"latency_s": small_s / 2, "bytes_per_second": size / max(large_s - small_s, 1e-9)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    exit_at_once(0)
