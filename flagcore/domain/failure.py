"""Classifies a failed launch by what ended it, its log and its exit code."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from flagcore.domain.launch import Exit, FailurePattern
from flagcore.domain.trial import TrialState
from flagcore.files import open_regular

TAIL_BYTES = 256 * 1024
LONGEST_LINE, LONGEST_REASON = 4096, 300


def classify(ended: Exit, log: str, patterns: Sequence[FailurePattern]) -> tuple[TrialState, str]:
    """Return the state of a failed trial and its reason in one line."""
    lines = [shown for line in log.splitlines() if (shown := _printable(line))]
    last = lines[-1][:LONGEST_REASON] if lines else "(none)"
    if ended.ended_by == "timeout":
        allowed = "the limit by max_time_per_task or the rest of max_time"
        return TrialState.TIMED_OUT, f"still running after {ended.duration_s:.0f} s, {allowed}; last line: {last}"
    if ended.ended_by == "memory":
        peak = (ended.peak_memory_bytes or 0) / 2**30
        return TrialState.OUT_OF_MEMORY, f"its processes grew to {peak:.2f} GiB, over the memory budget"
    if ended.ended_by == "disk":
        return TrialState.FAILED, "it exceeded the disk limit of its folder, or filled the disk"
    if ended.ended_by == "guard":
        return TrialState.FAILED, "its guard process was killed"
    if ended.ended_by == "request":
        return TrialState.INTERRUPTED, "ended on request"
    for known in sorted(patterns, key=lambda pattern: pattern.state is not TrialState.OUT_OF_MEMORY):
        for line in lines:
            if re.search(known.pattern, line):
                return known.state, line[:LONGEST_REASON] + (f" ({known.advice})" if known.advice else "")
    if ended.code in (-9, 137):
        return TrialState.OUT_OF_MEMORY, "killed by the system with SIGKILL: probably out of memory"
    how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return TrialState.FAILED, f"{how}; last line: {last}"


def _printable(line: str) -> str:
    """Return a log line without control characters, of bounded length."""
    return "".join(letter if letter.isprintable() else " " for letter in line[:LONGEST_LINE]).strip()


def log_tail(folder: str) -> str:
    """Return the ends of stdout and stderr; bytes that are not UTF-8 are replaced."""
    parts = []
    for name in ("stdout.log", "stderr.log"):
        try:
            with open_regular(os.path.join(folder, name)) as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - TAIL_BYTES))
                parts.append(file.read().decode("utf-8", errors="replace"))
        except OSError:
            continue
    return "\n".join(parts)
