"""The benchmark program: `python -m flagcore_training.microbench JOB.json`.

Exit codes: 0 success, 3 out of memory, 1 any other failure.
"""

import importlib
import os
import socket
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path

from flagcore_training.microbench import BenchmarkJob, load
from flagcore_training.trial.forked_ranks import OUT_OF_MEMORY, ran_out_of_memory, run_ranks


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
    for name in ("torch", *job.preload, "flagcore_training.microbench.measurement"):
        importlib.import_module(name)


def _work(job: BenchmarkJob, number: int, listener: socket.socket) -> int:
    """Run the process with the index `number`, and return its exit code. Failures are written to stderr."""
    try:
        _import(job)
        from flagcore_training.microbench.measurement import measure

        measure(job, number, listener)
    except BaseException as error:
        lacks_memory = ran_out_of_memory(error)
        if lacks_memory:
            print(f"out of memory: {' '.join(str(error).splitlines()[:1])}", file=sys.stderr)
        traceback.print_exception(error)
        sys.stderr.flush()
        return OUT_OF_MEMORY if lacks_memory else 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
