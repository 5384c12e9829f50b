"""Reads what a trial wrote: the files of the trial program, or the log of a user's own command.

Log lines: Megatron-LM core_v0.16 `training/training.py` (`training_log`), `training/utils.py` (`report_memory`) and
`training/arguments.py` (`_print_args`).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.devices import SPEED_TEST
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement
from flagcore.engines.megatron.split import EACH
from flagcore.engines.megatron.stages import LAYOUT
from flagcore.engines.results import METRICS, NoMetrics, interquartile_range, read_metrics
from flagcore.files import open_regular, read_regular

STEPS = "steps.jsonl"
LOGS = ("stdout.log", "stderr.log")
INVALID_JSON = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading JSON of another program may raise."""


def progress(task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
    """Return a function that returns the seconds of each step that a running trial has finished."""
    if task.spec.train.command is not None:
        return CommandProgress(folder)
    return partial(program_progress, folder)


def read(task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
    """Return the measurement of a trial. Raises NoMetrics."""
    if task.spec.train.command is not None:
        return _read_command(task, candidate, folder)
    return _read_program(task, folder, partial=partial)


def program_progress(folder: str) -> tuple[float, ...]:
    """Return the seconds of the steps that the trial program has finished."""
    return tuple(step["step_time_s"] for step in _steps(Path(folder, STEPS)))


class CommandProgress:
    """Reads the seconds of the steps that a user's command has printed. Each line is read once."""

    def __init__(self, folder: str) -> None:
        self._logs = MegatronLog()
        self._places = {Path(folder, name): 0 for name in LOGS}

    def __call__(self) -> tuple[float, ...]:
        for file, place in self._places.items():
            self._places[file] = read_on(file, place, self._logs)
        return tuple(self._logs.step_times_s)


def _read_program(task: Task, folder: str, *, partial: bool) -> Measurement:
    if partial:
        steps = _steps(Path(folder, STEPS))
        return measurement(task, [step["step_time_s"] for step in steps], losses=[step["loss"] for step in steps])
    data = read_metrics(folder)
    try:
        ranks: list[dict[str, Any]] = data["ranks"]
        return measurement(
            task,
            [float(step["step_time_s"]) for step in data["steps"]],
            losses=[_loss(step) for step in data["steps"]],
            peak_allocated_bytes=_most(ranks, "peak_allocated_bytes"),
            peak_reserved_bytes=_most(ranks, "peak_reserved_bytes"),
            device_used_bytes=_most(ranks, "device_used_bytes"),
            effective=dict(data["effective"]),
            versions={name: str(version) for name, version in data["versions"].items()},
            devices=tuple(
                {"device": int(rank["rank"]), SPEED_TEST: float(rank[SPEED_TEST])}
                for rank in ranks
                if rank.get(SPEED_TEST) is not None
            ),
        )
    except INVALID_JSON as error:
        raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None


def _read_command(task: Task, candidate: Candidate, folder: str) -> Measurement:
    log = read_logs(Path(folder, name) for name in LOGS)
    return measurement(
        task,
        log.step_times_s,
        losses=log.losses,
        peak_allocated_bytes=log.peak_allocated_bytes,
        peak_reserved_bytes=log.peak_reserved_bytes,
        effective=_effective(candidate, log),
    )


def measurement(task: Task, step_times_s: Sequence[float], **figures: Any) -> Measurement:
    """Return the measurement of a run from the times of all its steps. Raises NoMetrics if too few are left.

    The warm-up is dropped; the step time is the median of the rest, its spread their interquartile range.
    """
    spec, warmup = task.spec, task.spec.control.warmup_iters
    counted = tuple(step_times_s[warmup:])
    if not counted:
        raise NoMetrics(f"it left {len(step_times_s)} step times, and the first {warmup} are warm-up")
    if not all(isinstance(step, float) and math.isfinite(step) and step > 0 for step in counted):
        raise NoMetrics("a step time is not a positive number")
    median = statistics.median(counted)
    tokens = spec.train.global_batch_size * spec.train.seq_length
    if not math.isfinite(tokens / median):
        raise NoMetrics(f"a step time of {median} s cannot be")
    losses = tuple(figures.pop("losses"))
    return Measurement(
        step_times_s=counted,
        step_time_s=median,
        spread_s=interquartile_range(counted),
        tokens_per_second_per_device=tokens / median / task.cluster.devices,
        losses=losses,
        **figures,
    )


def _steps(file: Path) -> list[dict[str, Any]]:
    """Read the steps of a trial that may still write; a half-written last line does not count."""
    steps = []
    try:
        lines = read_regular(file).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            step = json.loads(line)
            steps.append({"step_time_s": float(step["step_time_s"]), "loss": _loss(step)})
        except INVALID_JSON:
            break
    return steps


def _loss(step: Mapping[str, Any]) -> float | None:
    loss = step["loss"]
    return float(loss) if loss is not None and math.isfinite(loss) else None


def _most(ranks: Sequence[Mapping[str, Any]], figure: str) -> int | None:
    known = [int(rank[figure]) for rank in ranks if rank.get(figure) is not None]
    return max(known) if known else None


def _effective(candidate: Candidate, log: MegatronLog) -> dict[str, KnobValue]:
    """Return the values that Megatron printed for the candidate's knobs, in the candidate's own types.

    A derived split is printed as its layout, which has the virtual stages, too.
    """
    effective: dict[str, KnobValue] = {}
    derived = (LAYOUT, EACH) if candidate.as_dict().get(LAYOUT) == "balanced" else ()
    for knob, wanted in candidate.items:
        if knob in derived:
            continue
        printed = log.arguments.get(knob)
        if printed is None:
            continue
        if isinstance(wanted, bool):
            effective[knob] = printed == "True"
        elif printed == "None":
            effective[knob] = None
        else:
            effective[knob] = int(printed) if printed.isdecimal() else printed
    return effective


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
"""A petabyte: a line with more is ignored."""
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
    """Read the log files of a run, line by line; invalid bytes and missing files are ignored."""
    log = MegatronLog()
    for file in files:
        read_on(file, 0, log, unfinished=True)
    return log


def read_on(file: Path, place: int, log: MegatronLog, *, unfinished: bool = False) -> int:
    """Add to `log` the lines of `file` from byte `place` on, and return where the next reading begins.

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
        loss, skipped = LOSS.search(line), NAN_ITERATIONS.search(line)
        if loss or skipped:
            log.losses.append(_number(loss[1]) if loss and not skipped else None)
    elif memory := MEMORY.search(line):
        allocated, reserved = _number(memory[2]), _number(memory[3])
        if allocated is not None and reserved is not None and max(allocated, reserved) < MOST_MIB:
            log.peak_allocated_bytes = max(log.peak_allocated_bytes or 0, int(allocated * MIB))
            log.peak_reserved_bytes = max(log.peak_reserved_bytes or 0, int(reserved * MIB))
    elif argument := ARGUMENT.match(line):
        log.arguments.setdefault(argument[1], argument[2])


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
