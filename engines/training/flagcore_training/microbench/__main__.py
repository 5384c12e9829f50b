"""The benchmark program: `python -m flagcore_training.microbench JOB.json`.

Exit codes: 0 success, 3 out of memory, 1 any other failure.
"""

import os
import socket
import sys
import warnings
from functools import partial
from pathlib import Path

from flagcore_training.microbench import BenchmarkJob, load
from flagcore_training.trial.forked_ranks import exit_at_once, import_all, run_ranks
from flagcore_training.trial.program import report


def main(arguments: list[str]) -> int:
    """Run the job in the file `arguments[0]`, and return the exit code."""
    job = load(Path(arguments[0]))
    warnings.filterwarnings("ignore")  # torch deprecates names of collectives that work in all versions
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # otherwise importing numpy starts threads before the fork
    if job.shared:
        os.environ["OMP_NUM_THREADS"] = str(job.threads)
        _import(job)  # only on a CPU: the driver of an accelerator does not survive a fork
    return run_ranks(job.devices, partial(_work, job))


def _import(job: BenchmarkJob) -> None:
    import_all("torch", *job.preload, "flagcore_training.microbench.measurement")


def _work(job: BenchmarkJob, number: int, listener: socket.socket) -> int:
    """Run the process with the index `number`, and return its exit code. Failures are written to stderr."""
    try:
        _import(job)
        from flagcore_training.microbench.measurement import measure

        measure(job, number, listener)
    except BaseException as error:
        return report(error)
    return 0


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
