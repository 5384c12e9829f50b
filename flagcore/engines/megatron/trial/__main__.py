"""Entry point of the trial program: `python -m flagcore.engines.megatron.trial JOB.json`.

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
from functools import partial
from pathlib import Path
from types import TracebackType

from flagcore.engines import forked_ranks as ranks
from flagcore.engines.forked_ranks import OUT_OF_MEMORY, ran_out_of_memory
from flagcore.engines.megatron.trial.job import Job, JobError, parse_job

FAILED = 1
INVALID = 2


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


def main(arguments: list[str]) -> int:
    """Run the job in the file `arguments[0]` and return the exit code."""
    try:
        job = read_job(arguments).started()
    except JobError as error:
        return report(error)
    prepare(job)
    try:
        clear_output(job.output)
        import_s = import_rank(job) if job.device.type == "cpu" else 0.0
    except Exception as error:
        return report(error)
    return ranks.run_on_host(job.processes, job.nodes, partial(run_forked_rank, job, import_s))


def ready(arguments: list[str]) -> None:
    """Import the modules that the job in the file `arguments[0]` needs, without running it.

    Raises RuntimeError if a module initializes the device, which a fork of this process could not use then.
    """
    job = read_job(arguments)
    prepare(job)
    import_rank(job)
    ranks.check_uninitialized(job.device.type)


def read_job(arguments: list[str]) -> Job:
    """Return the job in the file `arguments[0]`. Raises JobError if it is invalid."""
    if len(arguments) != 1:
        raise JobError("usage: python -m flagcore.engines.megatron.trial JOB.json")
    path = Path(arguments[0])
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: {error}") from None
    return parse_job(data)


def clear_output(folder: Path) -> None:
    """Create the output folder, and remove the results of an earlier run from it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("steps.jsonl", "metrics.json"):
        (folder / name).unlink(missing_ok=True)


def prepare(job: Job) -> None:
    """Set the environment variables that libraries read when they are imported."""
    warnings.filterwarnings("ignore")  # megatron warns about each missing optional library
    os.environ["OMP_NUM_THREADS"] = str(job.device.threads_per_rank)
    if job.device.type == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling helpers needs a C++ compiler and tens of seconds


def import_rank(job: Job) -> float:
    """Import torch, the modules that register the device, and the rank's program. Return the seconds that this took."""
    return ranks.import_all("torch", *job.device.preload, "flagcore.engines.megatron.trial.rank")


def run_forked_rank(job: Job, import_s: float, number: int, listener: socket.socket | None) -> int:
    """Run the rank with the index `number` and return its exit code. Failures are reported on stderr."""
    try:
        import_s += import_rank(job)
        from flagcore.engines.megatron.trial.rank import probe_rank, run_rank

        if job.probe is not None:
            probe_rank(job, job.probe, import_s)
        else:
            run_rank(job, number, listener, import_s)
    except BaseException as error:
        return report(error)
    return 0


if __name__ == "__main__":
    ranks.exit_at_once(main(sys.argv[1:]))
