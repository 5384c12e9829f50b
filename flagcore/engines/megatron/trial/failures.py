"""Maps a failure to the exit code of a trial and the first line on stderr."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from flagcore.engines.megatron.trial.job import JobError
from flagcore.forked_ranks import OUT_OF_MEMORY, ran_out_of_memory

FAILED = 1
INVALID = 2


def report(error: BaseException) -> int:
    """Write the failure to stderr, its kind first and its traceback after it, and return the exit code.

    A JobError has no traceback: it is not a failure of this program.
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

    A configuration is invalid if a check of this program, Megatron or transformer-engine refuses it. Some checks run
    only in the first step (schedules, token dispatch), so the module that raised the error counts, not the time.
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
    """Return the error in one line; an assertion without a message is its source line."""
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
