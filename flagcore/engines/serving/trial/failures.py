"""Failures of a trial: a class and one line with the first error in the engine's log."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flagcore.domain.files import open_regular
from flagcore.domain.launch import LONGEST_REASON, FailurePattern
from flagcore.domain.trial import TrialState

PREFIXES = {
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.INVALID: "invalid configuration",
    TrialState.TIMED_OUT: "timed out",
    TrialState.FAILED: "failed",
}
"""The prefix of the last line on stderr by the state of the trial."""
PATTERNS = tuple(FailurePattern(pattern=rf"^{words}:", state=state) for state, words in PREFIXES.items())

HEAD_BYTES, TAIL_BYTES = 4 << 20, 1 << 20
"""Bytes of a log that are read at its start and at its end."""
MAX_LINE = 2000
QUIET_SECONDS, LONGEST_SECONDS = 0.5, 5.0
NAMED_ERROR = re.compile(r"(?<![A-Za-z_.])[A-Za-z_.]*(Error|Exception)\b(: |$)")
ANY_ERROR = re.compile(r"\b(error|fatal|abort(ed)?|terminate called|failed|core dumped)\b", re.IGNORECASE)
HARMLESS = re.compile(
    r"\b(WARNING|WARN|INFO|DEBUG)\b|Warning: |^\s*(File \"|raise |at /)"
    r"|(?i:\b(falling back|ignored|ignoring|deprecated|skipping|retrying|no errors)\b)"
)
"""Lines that look like errors but are harmless, or only locate an error."""


class TrialFailure(Exception):
    """The trial ended without metrics. `state` is the class of the failure; the text is one line."""

    def __init__(self, state: TrialState, message: str) -> None:
        self.state = state
        super().__init__(message)

    def __str__(self) -> str:
        return f"{PREFIXES[self.state]}: {one_line(self.args[0])}"


def one_line(text: str) -> str:
    """Return `text` as one line with the maximum length of a reason."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[: LONGEST_REASON - 30]


def log_text(file: Path, begin: int = 0) -> str:
    """Return a log from byte `begin` on, only the start and the end of a long log; empty without a file."""
    try:
        with open_regular(file) as log:
            log.seek(begin)
            text = log.read(HEAD_BYTES)
            skipped = os.fstat(log.fileno()).st_size - begin - HEAD_BYTES
            if skipped > 0:
                log.seek(begin + HEAD_BYTES + max(0, skipped - TAIL_BYTES))
                text += b"\n" + log.read(TAIL_BYTES)
            return text.decode("utf-8", errors="replace")
    except OSError:
        return ""


def wait_until_quiet(file: Path) -> None:
    """Wait until nothing was written to a log for QUIET_SECONDS, at most LONGEST_SECONDS.

    Engines may write their log in a thread of its own (llama.cpp): when they answer, lines are still missing.
    """
    end = time.monotonic() + LONGEST_SECONDS
    while file.exists() and time.time() - file.stat().st_mtime < QUIET_SECONDS and time.monotonic() < end:
        time.sleep(0.05)


def first_error(log: str, patterns: Sequence[FailurePattern]) -> tuple[TrialState | None, str]:
    """Return the first error of a log: its state, None without a matching pattern, and the line.

    Matches of patterns take precedence, first of all those of out of memory; then the first line with an exception,
    then the first line that mentions an error, then the last line.
    """
    lines = [line.strip()[:MAX_LINE] for line in log.splitlines() if line.strip()]
    for pattern_ in sorted(patterns, key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY):
        for line in lines:
            if re.search(pattern_.pattern, line):
                return pattern_.state, line + (f" ({pattern_.advice})" if pattern_.advice else "")
    suspects = [line for line in lines if not HARMLESS.search(line)]
    for error_pattern in (NAMED_ERROR, ANY_ERROR):
        for line in suspects:
            if error_pattern.search(line):
                return None, line
    return None, suspects[-1] if suspects else ""


def server_failure(
    server: str, ending: str, log: Path, patterns: Sequence[FailurePattern], since: int = 0
) -> TrialFailure:
    """Return the failure of a server that ended, classified by its log.

    For a server that was healthy, the log from byte `since` on takes precedence over the log of its start.
    """
    state, line = None, ""
    for begin in dict.fromkeys((since, 0)):
        text = log_text(log, begin)
        state, line = first_error(text, patterns)
        if state is not None or NAMED_ERROR.search(line) or ANY_ERROR.search(line):
            break
    has_error = state is not None or NAMED_ERROR.search(line) or ANY_ERROR.search(line)
    quote = f"; its log{'' if has_error else ' names no error, and ends'}: {line}" if line else f"; {log.name} is empty"
    if state is None and ending.endswith("signal 9"):
        return TrialFailure(TrialState.OUT_OF_MEMORY, f"{server} {ending}: probably killed by the system{quote}")
    state = state if state in PREFIXES else TrialState.FAILED
    return TrialFailure(state or TrialState.FAILED, f"{server} {ending}{quote}")


CODES = {TrialState.FAILED: 1, TrialState.INVALID: 2, TrialState.OUT_OF_MEMORY: 3, TrialState.TIMED_OUT: 4}


def report(failure: TrialFailure) -> int:
    """Print a failure as the last line on stderr, and return the exit code of the program."""
    print(failure, file=sys.stderr, flush=True)
    return CODES[failure.state]
