"""What a failure means: the exit code of a trial and the first line that it leaves on stderr."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from flagcore.engines.megatron.trial.job import JobError
from flagcore.forked_ranks import OUT_OF_MEMORY, ran_out_of_memory

FAILED = 1
INVALID = 2


def report(error: BaseException) -> int:
    """Write the failure to stderr, its meaning first and its traceback after, and return the exit code.

    A job that cannot be run is one line without a traceback: nothing in this program went wrong.
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

    A configuration is invalid when this program's own checks, Megatron's or transformer-engine's refuse it. Some
    checks run only in the first step (schedules, token dispatch), so what counts is who raised it, not when.
    """
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, JobError):
        return INVALID
    where = _raised_in(error.__traceback__)
    refusal = isinstance(error, AssertionError | ValueError | NotImplementedError)
    if where.startswith("megatron."):
        return INVALID if refusal or type(error) is RuntimeError else FAILED
    return INVALID if refusal and where.startswith("transformer_engine.") else FAILED


def _first_line(error: BaseException) -> str:
    """The error in one line; for an assertion without a message, the assertion."""
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
