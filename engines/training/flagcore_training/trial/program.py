"""How a trial program starts, ends and reports: `python -m PROGRAM JOB.json`.

It forks the job's ranks, or the single rank of a probe. Ranks on a CPU are forked after the imports. Ranks on an
accelerator import in parallel after the fork, because they have enough cores. Exit codes: 0 success, 2 invalid
configuration, 3 out of memory, 1 other errors, 128 + signal if a signal ended it.
"""

import json
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from flagcore_training.trial import forked_ranks as ranks
from flagcore_training.trial.forked_ranks import OUT_OF_MEMORY, ran_out_of_memory
from flagcore_training.trial.job import JobError

FAILED = 1
INVALID = 2
Read: TypeAlias = Callable[[Any], Any]
"""A function that returns the job in decoded JSON. Raises JobError."""


def report(error: BaseException) -> int:
    """Write a failure to stderr, first its kind and then its traceback, and return the exit code.

    A JobError has no traceback, because it is not a failure of this program.
    """
    code = classify(error)
    first_line = _first_line(error)
    if code == INVALID:
        print(f"invalid configuration: {first_line}", file=sys.stderr)
    elif code == OUT_OF_MEMORY:
        print(f"out of memory: {first_line}", file=sys.stderr)
    if not isinstance(error, JobError):
        traceback.print_exception(error)
    sys.stderr.flush()
    return code


def classify(error: BaseException) -> int:
    """Return the exit code for a failure: out of memory, an invalid configuration, or anything else.

    A configuration is invalid if a check of this program, Megatron or transformer-engine refuses it. Some checks run in
    the first step, so the module that raised the error decides, not the time.
    """
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, JobError):
        return INVALID
    module = _raised_in(error.__traceback__)
    is_refusal = isinstance(error, AssertionError | ValueError | NotImplementedError)
    if module.startswith("megatron."):
        return INVALID if is_refusal or type(error) is RuntimeError else FAILED
    return INVALID if is_refusal and module.startswith("transformer_engine.") else FAILED


def _first_line(error: BaseException) -> str:
    """Return the error in one line. For an assertion without a message, return its source line."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    if isinstance(error, AssertionError) and (not lines or line.startswith("when instantiating")):
        frames = traceback.extract_tb(error.__traceback__)
        return f"{frames[-1].line} ({line})" if frames else line
    return line


def _raised_in(trace: TracebackType | None) -> str:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""


def main(arguments: list[str], read: Read, rank: str) -> int:
    """Run the job in the file `arguments[0]`, which `read` returns, and return the exit code.

    `rank`: the module of an engine with its function `run_rank`.
    """
    try:
        job = _job(arguments, read).started()
        prepare(job)
        clear_output(job.output)
        import_s = import_rank(job, rank) if job.device.type == "cpu" else 0.0
    except Exception as error:
        return report(error)
    return ranks.run_on_host(job.processes, job.nodes, partial(run_forked_rank, job, import_s, rank=rank))


def ready(arguments: list[str], read: Read, rank: str) -> None:
    """Import the modules that the job in the file `arguments[0]` needs, without running it.

    Raises RuntimeError if a module initializes the device, which a fork of this process could not use then.
    """
    job = _job(arguments, read)
    prepare(job)
    import_rank(job, rank)
    ranks.check_uninitialized(job.device.type)


def _job(arguments: list[str], read: Read) -> Any:
    """Return the job in the file `arguments[0]`. Raises JobError if it is invalid."""
    if len(arguments) != 1:
        raise JobError("usage: the only argument is the path of a job file, JOB.json")
    try:
        return read(json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise JobError(f"{arguments[0]}: {error}") from None


def clear_output(folder: Path) -> None:
    """Create the output folder, and remove the results of an earlier run from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("steps.jsonl", "metrics.json"):
        (folder / name).unlink(missing_ok=True)


def prepare(job: Any) -> None:
    """Set the environment variables that libraries read when they are imported."""
    warnings.filterwarnings("ignore")  # megatron warns about each missing optional library
    os.environ["OMP_NUM_THREADS"] = str(job.device.threads_per_rank)
    if job.device.type == "cpu" and not getattr(job.candidate, "compile", False):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling helpers needs a C++ compiler and tens of seconds


def import_rank(job: Any, rank: str) -> float:
    """Import torch, the modules that register the device, and the rank's program. Return the seconds that this took."""
    return ranks.import_all("torch", *job.device.preload, rank)


def run_forked_rank(job: Any, import_s: float, number: int, listener: socket.socket | None, rank: str) -> int:
    """Run the rank with the index `number` and return its exit code. Failures are reported on stderr."""
    try:
        import_s += import_rank(job, rank)
        sys.modules[rank].run_rank(job, number, listener, import_s)
    except BaseException as error:
        return report(error)
    return 0
