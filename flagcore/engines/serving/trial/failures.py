"""Why a trial has no figures: its class, one line, and the first error in the engine's log."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from flagcore.domain.launch import LONGEST_REASON, FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.files import open_regular

WORDS = {
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.INVALID: "invalid configuration",
    TrialState.TIMED_OUT: "timed out",
    TrialState.FAILED: "failed",
}
"""The beginning of the last line on stderr, by the state of the trial."""
PATTERNS = tuple(FailurePattern(pattern=rf"^{words}:", state=state) for state, words in WORDS.items())

HEAD_BYTES, TAIL_BYTES = 4 << 20, 1 << 20
"""Bytes read of a log: its start and its end."""
MAX_LINE = 2000
NAMED = re.compile(r"(?<![A-Za-z_.])[A-Za-z_.]*(Error|Exception)\b(: |$)")
ANY = re.compile(r"\b(error|fatal|abort(ed)?|terminate called|failed|core dumped)\b", re.IGNORECASE)
HARMLESS = re.compile(
    r"\b(WARNING|WARN|INFO|DEBUG)\b|Warning: |^\s*(File \"|raise |at /)"
    r"|(?i:\b(falling back|ignored|ignoring|deprecated|skipping|retrying|no errors)\b)"
)
"""Lines that look like an error and are none, or only locate it."""


class TrialFailure(Exception):
    """The trial ended without figures. `state` is its class; the text is one line."""

    def __init__(self, state: TrialState, message: str) -> None:
        self.state = state
        super().__init__(message)

    def __str__(self) -> str:
        return f"{WORDS[self.state]}: {one_line(self.args[0])}"


def one_line(text: str) -> str:
    """Return `text` as one line that fits into a reason."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[: LONGEST_REASON - 30]


def log_text(file: Path, begin: int = 0) -> str:
    """Return a log from byte `begin` on, of a long one its start and its end; empty if there is none."""
    try:
        with open_regular(file) as log:
            log.seek(begin)
            text = log.read(HEAD_BYTES)
            rest = os.fstat(log.fileno()).st_size - begin - HEAD_BYTES
            if rest > 0:
                log.seek(begin + HEAD_BYTES + max(0, rest - TAIL_BYTES))
                text += b"\n" + log.read(TAIL_BYTES)
            return text.decode("utf-8", errors="replace")
    except OSError:
        return ""


def first_error(log: str, patterns: Sequence[FailurePattern]) -> tuple[TrialState | None, str]:
    """Return the first error of a log: the class that a pattern gives it, and the line; empty if there is none.

    Matches of patterns go first, out of memory before all; then the first line that names an exception, then the first
    that mentions an error. An engine's last line often only mentions an error.
    """
    lines = [line.strip()[:MAX_LINE] for line in log.splitlines() if line.strip()]
    for known in sorted(patterns, key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY):
        for line in lines:
            if re.search(known.pattern, line):
                return known.state, line + (f" ({known.advice})" if known.advice else "")
    suspects = [line for line in lines if not HARMLESS.search(line)]
    for sign in (NAMED, ANY):
        for line in suspects:
            if sign.search(line):
                return None, line
    return None, suspects[-1] if suspects else ""


def died(who: str, how: str, log: Path, patterns: Sequence[FailurePattern], since: int = 0) -> TrialFailure:
    """Return the failure of a server that ended, classified by its log.

    For a server that was healthy, the log from byte `since` takes precedence over that of its start.
    """
    state, line = None, ""
    for begin in dict.fromkeys((since, 0)):
        text = log_text(log, begin)
        state, line = first_error(text, patterns)
        if state is not None or NAMED.search(line) or ANY.search(line):
            break
    has_error = state is not None or NAMED.search(line) or ANY.search(line)
    quote = f"; its log{'' if has_error else ' names no error, and ends'}: {line}" if line else f"; {log.name} is empty"
    if state is None and how.endswith("signal 9"):
        return TrialFailure(TrialState.OUT_OF_MEMORY, f"{who} {how}: probably killed by the system{quote}")
    state = state if state in WORDS else TrialState.FAILED
    return TrialFailure(state or TrialState.FAILED, f"{who} {how}{quote}")
