"""What Megatron-LM prints: step times, loss, memory and the arguments that it really used.

Source: Megatron-LM core_v0.16 `training/training.py` (`training_log`), `training/utils.py` (`report_memory`)
and `training/arguments.py` (`_print_args`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flagcore.files import open_regular

ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*([0-9.]+)\s*\|")
LOSS = re.compile(r"lm loss:\s*([^\s|]+)", re.IGNORECASE)
NAN_ITERATIONS = re.compile(r"number of nan iterations:\s*([1-9]\d*)")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|"
    r".*?max allocated:\s*([0-9.]+) \|.*?max reserved:\s*([0-9.]+)"
)
ARGUMENT = re.compile(r"^\s*(?:\d+:\s*)?([a-z_0-9]+) \.{3,}\s*(\S+)\s*$")
MIB = 1 << 20
MOST_MIB = 1 << 30
"""A petabyte: a line that tells of more tells nonsense."""
LONGEST_LINE = 4096
LARGEST_LOG = 64 << 20
"""Bytes beyond these are not looked at: a trial may print anything."""


@dataclass(slots=True)
class MegatronLog:
    """The figures of one run: seconds by step, losses (None where not finite), peak bytes over the ranks."""

    step_times_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    arguments: dict[str, str] = field(default_factory=dict)


def read_logs(files: Iterable[Path]) -> MegatronLog:
    """Read the log files of a run, line by line; bytes that are no text are ignored, missing files too."""
    log = MegatronLog()
    for file in files:
        read_on(file, 0, log, unfinished=True)
    return log


def read_on(file: Path, place: int, log: MegatronLog, *, unfinished: bool = False) -> int:
    """Add to `log` what stands in `file` from the byte `place` on, and return where the next reading begins.

    A last line without an end is left for then, unless `unfinished`.
    """
    with suppress(OSError), open_regular(file) as lines:
        lines.seek(place)
        while place < LARGEST_LOG and (line := lines.readline(LONGEST_LINE)):
            if not (line.endswith(b"\n") or unfinished or len(line) == LONGEST_LINE):
                break
            place += len(line)
            _read_line(line.decode("utf-8", errors="replace"), log)
    return place


def _read_line(line: str, log: MegatronLog) -> None:
    if step := ITERATION.search(line):
        seconds = _number(step[2])
        if seconds is None:
            return
        log.step_times_s.append(seconds / 1000)
        if loss := LOSS.search(line):
            log.losses.append(None if NAN_ITERATIONS.search(line) else _number(loss[1]))
        elif NAN_ITERATIONS.search(line):
            log.losses.append(None)
    elif memory := MEMORY.search(line):
        allocated, reserved = _number(memory[2]), _number(memory[3])
        if allocated is not None and reserved is not None and max(allocated, reserved) < MOST_MIB:
            log.peak_allocated_bytes = max(log.peak_allocated_bytes or 0, int(allocated * MIB))
            log.peak_reserved_bytes = max(log.peak_reserved_bytes or 0, int(reserved * MIB))
    elif argument := ARGUMENT.match(line):
        log.arguments.setdefault(argument[1], argument[2])


def _number(text: str) -> float | None:
    """Return `text` as a finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
