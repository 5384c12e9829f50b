"""Megatron-LM's log lines.

Sources: Megatron-LM core_v0.16 `training/training.py` (`training_log`), `training/utils.py` (`report_memory`) and
`training/arguments.py` (`_print_args`); torch 2.13 `distributed/elastic/multiprocessing` for the prefixes of ranks.
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
NOT_FINITE = re.compile(r"number of nan iterations:\s*[1-9]|grad norm:\s*[-+]?(nan|inf)", re.IGNORECASE)
SKIPPED = re.compile(r"number of skipped iterations:\s*[1-9]")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|"
    r".*?max allocated:\s*([0-9.]+) \|.*?max reserved:\s*([0-9.]+)"
)
ARGUMENT = re.compile(r"^(?:\[\w+\]:|\d+:)?\s*([a-z_0-9]+) \.{3,}\s*(\S+|\[.*\])\s*$")
MIB = 1 << 20
MAX_MIB = 1 << 30
"""A line that reports more (1 PiB) is ignored."""
LONGEST_LINE = 4096
LARGEST_LOG = 64 << 20
"""Bytes that are read of one log; the rest is ignored."""
MAX_FILES = 1024
LOGS = ("stdout.log", "stderr.log")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One iteration as logged. `losses` is empty if no loss was logged, and has None for a loss that is not finite.

    `skipped` marks a step without an update of the weights.
    """

    seconds: float
    losses: tuple[float | None, ...]
    skipped: bool


@dataclass(slots=True)
class MegatronLog:
    """The metrics of one run: its steps by iteration, peak bytes over the ranks, and the printed arguments."""

    steps: dict[int, LoggedStep] = field(default_factory=dict)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def step_times_s(self) -> list[float]:
        """The seconds of each step, in the order of their first log lines."""
        return [step.seconds for step in self.steps.values()]

    @property
    def losses(self) -> list[float | None]:
        """The logged losses of all steps, None where not finite."""
        return [loss for step in self.steps.values() for loss in step.losses]


def log_files(folder: str) -> list[Path]:
    """Return the logs of a trial: its own, and the logs of ranks that torchrun wrote into subfolders."""
    own, found = [Path(folder, name) for name in LOGS], list[Path]()
    with suppress(OSError):
        for file in Path(folder).glob("**/*.log"):
            if file.name in LOGS and file not in own and len(found) < MAX_FILES:
                found.append(file)
    return [*own, *sorted(found)]


def read_logs(files: Iterable[Path]) -> MegatronLog:
    """Read the log files of a run, line by line; invalid bytes and missing files are ignored."""
    log = MegatronLog()
    for file in files:
        read_on(file, 0, log, unfinished=True)
    return log


def read_on(file: Path, offset: int, log: MegatronLog, *, unfinished: bool = False) -> int:
    """Add to `log` the lines of `file` from byte `offset` on, and return the offset for the next call.

    A last line without a line break is left for the next call, unless `unfinished`.
    """
    with suppress(OSError), open_regular(file) as lines:
        lines.seek(offset)
        while offset < LARGEST_LOG and (line := lines.readline(LONGEST_LINE)):
            if not (line.endswith(b"\n") or unfinished or len(line) == LONGEST_LINE):
                break
            offset += len(line)
            _read_line(line.decode("utf-8", errors="replace"), log)
    return offset


def _read_line(line: str, log: MegatronLog) -> None:
    """Add one line to `log`. An iteration that several ranks print counts once."""
    if step := ITERATION.search(line):
        seconds = _number(step[2])
        if seconds is not None and step[1].isdecimal():
            log.steps.setdefault(int(step[1]), _step(line, seconds / 1000))
    elif memory := MEMORY.search(line):
        allocated, reserved = _number(memory[2]), _number(memory[3])
        if allocated is not None and reserved is not None and max(allocated, reserved) < MAX_MIB:
            log.peak_allocated_bytes = max(log.peak_allocated_bytes or 0, int(allocated * MIB))
            log.peak_reserved_bytes = max(log.peak_reserved_bytes or 0, int(reserved * MIB))
    elif argument := ARGUMENT.match(line):
        log.arguments.setdefault(argument[1], argument[2])


def _step(line: str, seconds: float) -> LoggedStep:
    loss, skipped = LOSS.search(line), SKIPPED.search(line) is not None
    losses: tuple[float | None, ...] = (_number(loss[1]),) if loss else ()
    if NOT_FINITE.search(line) and not skipped:
        losses = (None,)
    return LoggedStep(seconds=seconds, losses=losses, skipped=skipped)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
