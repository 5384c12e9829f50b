"""Entry point of the trial program: `python -m flagcore_trainers.fsdp2 JOB.json`.

It forks the ranks of a job. Ranks on a CPU are forked after the imports, others import after the fork. Exit codes:
0 success, 2 invalid configuration, 3 out of memory, 1 other errors, 128 + signal if a signal ended it.
"""

import importlib
import os
import socket
import sys
from functools import partial
from pathlib import Path

from flagcore.engines import forked_ranks as ranks
from flagcore.engines.megatron.trial.__main__ import clear_output, report
from flagcore.engines.megatron.trial.job import JobError
from flagcore_trainers.fsdp2.job import Job, read_job

RANK = "flagcore_trainers.fsdp2.rank"


def main(arguments: list[str]) -> int:
    """Run the job in the file `arguments[0]` and return the exit code."""
    try:
        job = _job(arguments).started()
        os.environ["OMP_NUM_THREADS"] = str(job.device.threads_per_rank)
        clear_output(job.output)
        import_s = _import(job) if job.device.type == "cpu" else 0.0
    except Exception as error:
        return report(error)
    return ranks.run_on_host(job.processes, job.nodes, partial(_run, job, import_s))


def ready(arguments: list[str]) -> None:
    """Import the modules that a job needs. Raises RuntimeError if this initializes the device."""
    job = _job(arguments)
    os.environ["OMP_NUM_THREADS"] = str(job.device.threads_per_rank)
    _import(job)
    ranks.check_uninitialized(job.device.type)


def _job(arguments: list[str]) -> Job:
    if len(arguments) != 1:
        raise JobError("usage: python -m flagcore_trainers.fsdp2 JOB.json")
    return read_job(Path(arguments[0]))


def _import(job: Job) -> float:
    """Import torch, the modules that register the device, and the rank's program. Return the seconds that this took."""
    return ranks.import_all("torch", *job.device.preload, RANK)


def _run(job: Job, import_s: float, number: int, listener: socket.socket | None) -> int:
    """Run the rank with the index `number`, and return its exit code. Failures are reported on stderr."""
    try:
        import_s += _import(job)
        importlib.import_module(RANK).run_rank(job, number, listener, import_s)
    except BaseException as error:
        return report(error)
    return 0


if __name__ == "__main__":
    ranks.exit_at_once(main(sys.argv[1:]))
