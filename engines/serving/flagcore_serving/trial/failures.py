"""Classifies the failures of a trial, and finds the first error in the engine's log."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flagcore.domain.files import open_regular
from flagcore.domain.launch import LONGEST_REASON, FailurePattern, first_match
from flagcore.domain.trial import TrialState

PREFIXES = {
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.INVALID: "invalid configuration",
    TrialState.TIMED_OUT: "timed out",
    TrialState.FAILED: "failed",
}
"""The beginning of the last line on stderr, by the state of the trial."""
PATTERNS = tuple(FailurePattern(pattern=rf"^{words}:", state=state) for state, words in PREFIXES.items())

HEAD_BYTES, TAIL_BYTES = 4 << 20, 1 << 20
"""Maximum number of bytes that are read at the start of a log and at its end."""
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
    """The trial ended without metrics. `state`: the class of the failure. The exception's text is one line."""

    def __init__(self, state: TrialState, message: str) -> None:
        self.state = state
        super().__init__(message)

    def __str__(self) -> str:
        return f"{PREFIXES[self.state]}: {one_line(self.args[0])}"


def one_line(text: str) -> str:
    """Return `text` as one line, truncated to the maximum length of a reason."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[: LONGEST_REASON - 30]


def log_text(file: Path, begin: int = 0) -> str:
    """Return a log after its first `begin` bytes, or "" if there is no file. The middle of a long log is removed."""
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
    """Wait until nothing has been written to a log for QUIET_SECONDS, but at most LONGEST_SECONDS.

    Some engines (llama.cpp) write their log in a separate thread: when they answer, lines may still be missing.
    """
    end = time.monotonic() + LONGEST_SECONDS
    while file.exists() and time.time() - file.stat().st_mtime < QUIET_SECONDS and time.monotonic() < end:
        time.sleep(0.05)


def first_error(log: str, patterns: Sequence[FailurePattern]) -> tuple[TrialState | None, str]:
    """Return the state and the line of the first error in a log.

    The line is, in order of preference: a match of a pattern, out-of-memory patterns first; the first line with an
    exception; a match of a weak pattern; the first line that mentions an error; the last line. The state is None if no
    pattern matches.
    """
    lines = [line[:MAX_LINE] for line in filter(None, map(str.strip, log.splitlines()))]
    weak_patterns = [each for each in patterns if each.weak]
    suspects = [line for line in lines if not HARMLESS.search(line)]
    causes = [line for line in suspects if not first_match([line], weak_patterns)]
    for tried, searched, error_pattern in (
        ([each for each in patterns if not each.weak], causes, NAMED_ERROR),
        (weak_patterns, suspects, ANY_ERROR),
    ):
        if found := first_match(lines, tried):
            pattern, match = found
            return pattern.state, match.string + (f" ({pattern.advice})" if pattern.advice else "")
        if named := next(filter(error_pattern.search, searched), None):
            return None, named
    return None, suspects[-1] if suspects else ""


def server_failure(
    server: str, ending: str, log: Path, patterns: Sequence[FailurePattern], since: int = 0
) -> TrialFailure:
    """Return the failure of a server that ended, classified by its log.

    `ending`: how it ended, with its exit code or signal. `since`: the length of the log when the server became healthy;
    errors after it take precedence over errors during the start.
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
    """Print a failure as the last line on stderr, and return the program's exit code."""
    print(failure, file=sys.stderr, flush=True)
    return CODES[failure.state]
