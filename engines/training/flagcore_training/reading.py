"""Reads the results of a training trial: the files of a trial program, and the logs of a user's command.

Source of the prefixes of ranks: torch 2.13 `distributed/elastic/multiprocessing`.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flagcore_vendorkit.metrics import METRICS, NoMetrics, interquartile_range, read_metrics

from flagcore.domain.chip import SPEED_TEST
from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.launch import FailurePattern
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, TrialState
from flagcore.spec.plain_data import package_yaml

MAX_MIB = 1 << 30
"""Maximum plausible memory in MiB (1 PiB). Lines that report more are ignored."""
LONGEST_LINE = 4096
LARGEST_LOG, BYTES_PER_CALL, BYTES_PER_READ = 1 << 30, 1 << 28, 1 << 20
"""Maximum number of bytes that are read of one log, of all logs in one call while the trial runs, and at once. Short
lines are read at about 70 MiB/s, long ones at 1.5 GiB/s."""
MAX_FILES = 1024
LOGS = ("stdout.log", "stderr.log")
SEARCH_INTERVAL_SECONDS = 2.0
"""Seconds between two searches for new log files."""


def log_files(folder: str) -> list[Path]:
    """Return the logs of a trial: its own, and those that torchrun wrote into subfolders for each rank."""
    trial_logs, rank_logs = [Path(folder, name) for name in LOGS], list[Path]()
    with suppress(OSError):
        for file in Path(folder).glob("**/*.log"):
            if file.name in LOGS and file not in trial_logs and len(rank_logs) < MAX_FILES:
                rank_logs.append(file)
    return [*trial_logs, *sorted(rank_logs)]


class LogFiles:
    """The logs of one trial. `add` gets each line once, without its line break; a carriage return ends a line, too.

    Of a line with more than `longest` characters, only its beginning is read.
    """

    def __init__(self, folder: str, add: Callable[[str], None], longest: int = LONGEST_LINE) -> None:
        self._folder, self._add, self._search_at, self._longest = folder, add, 0.0, longest
        self._places: dict[Path, int] = {}
        self._in_long_line: set[Path] = set()

    def read(self, *, unfinished: bool = False) -> None:
        """Read what was added since the last call, at most BYTES_PER_CALL.

        `unfinished`: read all of it, and also a last line without a line break. Invalid bytes and missing files are
        ignored.
        """
        if unfinished or time.monotonic() >= self._search_at:
            self._places = {file: self._places.get(file, 0) for file in log_files(self._folder)}
            self._search_at = time.monotonic() + SEARCH_INTERVAL_SECONDS
        left = LARGEST_LOG if unfinished else BYTES_PER_CALL
        for file, place in self._places.items():
            self._places[file] = self._read_on(file, place, place + left, unfinished)
            left -= 0 if unfinished else self._places[file] - place

    @property
    def note(self) -> str:
        """The log whose end was not read, with the limit, to be added to a message. Empty if there is none."""
        cut = next((file for file, place in self._places.items() if place >= LARGEST_LOG), None)
        return f"; only the first {LARGEST_LOG >> 20} MiB of {cut.name} were read" if cut else ""

    def _read_on(self, file: Path, place: int, end: int, unfinished: bool) -> int:
        with suppress(OSError), open_regular(file) as log:
            log.seek(place)
            while place < min(end, LARGEST_LOG) and (data := log.read(BYTES_PER_READ)):
                size = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
                if not size and not unfinished and len(data) < self._longest:
                    break
                *lines, rest = data[: size or None].decode("utf-8", errors="replace").replace("\r", "\n").split("\n")
                for line in [*lines, *([] if size else [rest])][file in self._in_long_line :]:
                    self._add(line[: self._longest])
                (self._in_long_line.discard if size else self._in_long_line.add)(file)
                place += size or len(data)
                log.seek(place)
        return place


RANK_PREFIX = r"^(?:\[[\w:]+\]:\s*)*(?!\s*\[[\w:]+\]:)"
"""Matches all prefixes that torchrun and torch add to a line of a rank: `[default0]:[rank0]: `.

If it could also match some of them, a line of many prefixes would be searched once for each of them."""
PEER_FAILURE = r"\bgloo\b|DistBackendError|Connection (?:reset|closed)|Broken pipe"
"""Matches errors of a rank that failed only because another rank failed, in the words of torch.

Plugins add the words of their vendors' collective libraries, as weak patterns.
"""


FAILURES = tuple(
    FailurePattern(
        pattern=row.pop("pattern").format(rank=RANK_PREFIX, peer=PEER_FAILURE),
        state=TrialState(row.pop("state")),
        **row,
    )
    for row in package_yaml(__package__, "failures.yaml")
)
"""Patterns of failures in the log of a trial, from flagcore's trial program, Megatron-LM and torchrun.

The first pattern that matches a line is used, so the most specific ones come first. torchrun prints its own error after
the cause."""


STEPS = "steps.jsonl"
INVALID_JSON = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions that may be raised when the JSON of another program is read."""


def program_progress(folder: str) -> tuple[float, ...]:
    """Return the seconds of the steps that a trial program has finished so far."""
    return tuple(step["step_time_s"] for step in _steps(Path(folder, STEPS)))


def read_program(
    task: Task,
    folder: str,
    *,
    partial: bool,
    effective: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    devices: Mapping[int, int] | None = None,
) -> Measurement:
    """Return the measurement of a trial program. Raises NoMetrics if it has written none.

    `partial`: whether it was stopped, and only finished steps count. `effective`: converts the values in use that it
    wrote to values of knobs. `devices`: the device of each rank, by default the one with its number.
    """
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
            peak_allocated_bytes=_max_over_ranks(ranks, "peak_allocated_bytes"),
            peak_reserved_bytes=_max_over_ranks(ranks, "peak_reserved_bytes"),
            device_used_bytes=_max_over_ranks(ranks, "device_used_bytes"),
            effective=effective(data["effective"]),
            versions={name: str(version) for name, version in data["versions"].items()},
            devices=tuple(
                {"device": (devices or {}).get(rank["rank"], int(rank["rank"])), SPEED_TEST: float(rank[SPEED_TEST])}
                for rank in ranks
                if rank.get(SPEED_TEST) is not None
            ),
        )
    except INVALID_JSON as error:
        raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None


def measurement(task: Task, step_times_s: Sequence[float], warmup: int | None = None, **figures: Any) -> Measurement:
    """Return the measurement of a run from the times of all its steps. Raises NoMetrics if all steps are warm-up.

    `warmup` is the number of warm-up steps. If it is None, it is `warmup_iters`, or fewer if no further step is
    finished. The step time is the median of the steps after the warm-up, the spread their interquartile range.
    """
    spec, control = task.spec, task.spec.control
    warmup = warmup_of_fewer(len(step_times_s), control.warmup_iters) if warmup is None else warmup
    measured_times_s = tuple(step_times_s[warmup:])
    if not measured_times_s:
        raise NoMetrics(f"the log has {len(step_times_s)} step times, and the first {warmup} are warm-up")
    median = statistics.median(measured_times_s)
    tokens = spec.train.global_batch_size * spec.train.seq_length
    losses = tuple(figures.pop("losses"))
    return Measurement(
        step_times_s=measured_times_s,
        step_time_s=median,
        spread_s=interquartile_range(measured_times_s),
        tokens_per_second_per_device=tokens / median / task.cluster.devices if median else math.inf,
        losses=losses,
        warmup_steps=warmup if len(step_times_s) < control.train_iters else None,
        **figures,
    )


def warmup_of_fewer(steps: int, at_most: int) -> int:
    """Return the number of warm-up steps of a trial that ended early, after `steps` steps.

    It is `at_most` if that leaves steps to measure, else half of the steps, but at least one.
    """
    return at_most if steps > at_most else max(1, steps // 2)


def _steps(file: Path) -> list[dict[str, Any]]:
    """Return the steps of a trial that may still be running. An incomplete last line is ignored."""
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


def _max_over_ranks(ranks: Sequence[Mapping[str, Any]], metric: str) -> int | None:
    values = [int(rank[metric]) for rank in ranks if rank.get(metric) is not None]
    return max(values) if values else None


def finite_number(text: str) -> float | None:
    """Return the finite number that a text is, or None. `1_000` is none: only Python's own literals have a `_`."""
    try:
        number = math.nan if "_" in text else float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
