"""Times collectives at given sizes, and compares their results.

`python -m flagcore_training.microbench.collectives JOB.json` reads `kind`, `backend`, `preload`, `devices`, `shared`,
`threads` as in `BenchmarkJob`, and `calls`: lists of a kind of collective, the number of ranks, how many devices they
are apart, and bytes. All groups of a call run at the same time. `seconds` is the time of a call's samples.

The file `output` gets a list for each call: its microseconds, the digest of its results for inputs whose sums are exact
in any order, and that for random inputs.
"""

import hashlib
import json
import os
import socket
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from flagcore_training.trial.forked_ranks import exit_at_once, import_all, run_ranks
from flagcore_training.trial.program import report

CHECKED_BYTES = 64 << 20
"""The largest tensor whose results are compared."""
SEED = 20261128


def main(file: str) -> int:
    """Run the job in a file, and return the exit code."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    warnings.filterwarnings("ignore")
    if job["shared"]:
        os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    return run_ranks(job["devices"], partial(_work, job))


def _work(job: dict[str, Any], number: int, listener: socket.socket) -> int:
    try:
        import_all("torch", *job["preload"])
        _measure(job, number, listener)
    except BaseException as error:
        return report(error)
    return 0


def _measure(job: dict[str, Any], number: int, listener: socket.socket) -> None:
    import torch
    import torch.distributed as dist

    from flagcore_training.microbench.kernels import Bench
    from flagcore_training.microbench.measurement import collective_call
    from flagcore_training.trial.rank_device import join_group

    bench, devices, found = Bench(job["kind"], number, is_distributed=True), job["devices"], []
    if job["shared"]:
        torch.set_num_threads(job["threads"])
    join_group(job["backend"], number, devices, listener)

    def filled(exact: bool, like: Any) -> Any:
        own = torch.Generator().manual_seed(SEED + number)
        values = torch.randint(-1, 2, like.shape, generator=own) if exact else torch.randn(like.shape, generator=own)
        return values.to(like)

    for kind, ranks, stride, size in job["calls"]:
        starts = [start + place for start in range(0, devices, ranks * stride) for place in range(stride)]
        members = [list(range(start, start + ranks * stride, stride)) for start in starts]
        groups = [dist.new_group(each) for each in members]
        group = next(each for each, own in zip(groups, members, strict=True) if number in own)
        digests = []
        for exact in (True, False):
            fill = partial(filled, exact)
            result = collective_call(kind, min(size, CHECKED_BYTES), ranks, group, bench.device, fill)()
            bench.synchronize()
            digests.append(hashlib.sha256(result.cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
        call = collective_call(kind, size, ranks, group, bench.device)
        found.append([1e6 * bench.time(call, job["seconds"], alone=False).seconds, *digests])
    own = Path(f"{job['output']}.{number}")
    own.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    if number == 0:
        of_ranks = (json.loads(own.with_suffix(f".{rank}").read_text(encoding="utf-8")) for rank in range(devices))
        joined = [
            (call[0][0], "".join(each[1] for each in call), "".join(each[2] for each in call))
            for call in zip(*of_ranks, strict=True)
        ]
        Path(job["output"]).write_text(json.dumps(joined), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1]))
