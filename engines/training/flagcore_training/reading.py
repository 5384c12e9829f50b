"""Reads the results of a training trial: the files of a trial program, and the logs of a user's command.

Source of the prefixes of ranks: torch 2.13 `distributed/elastic/multiprocessing`.

Compares its losses and gradient norms with those of the baseline: the first two steps of flagcore's trial program have
the initial weights, which are the same in all layouts, and the second step has the samples of the first one in another
order: the baseline's difference between both is its own noise, at least that of NOISE. In later steps, and in logs of
users' programs, the limit is the share `control.answers`.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore_vendorkit.metrics import METRICS, NoMetrics, interquartile_range, read_metrics

from flagcore.domain.chip import SPEED_TEST
from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.knob import ANSWERS
from flagcore.domain.launch import FailurePattern
from flagcore.domain.spec import Task
from flagcore.domain.trial import Answers, Measurement, TrialState
from flagcore.errors import FlagError
from flagcore.i18n import N_
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


*_, SEEDS, CHANGES = ANSWERS
USUAL_NOISE = (5e-5, 5e-4)
NOISE = {"fp32": (1e-6, 1e-4), "fp16": (1e-5, 1e-4)}
"""The least relative noise of the loss and of the gradient norm, by precision; that of bf16 is USUAL_NOISE.

On a CPU with megatron-core 0.16.1, layouts differ by up to 1e-7 and 7.5e-5 in fp32 (DP 2 and TP 2 of
examples/train-cpu.yaml: a norm is a long sum in fp32), and by 1e-5 and 2e-4 in bf16. Kernels of GPUs, which were not
measured, may differ by more, so that the values of bf16 are larger."""
MOST_NOISES = 10.0
"""The largest difference that counts as noise. Chosen by hand: a lost block of attention or a rank's part of a sum
change loss or norm by more in all precisions; a fifth of the tokens of experts in fp32, but not always in bf16."""
NORMS = 10.0
"""Where gradient norms may differ, they may differ by more than losses by this factor. Chosen by hand."""


@dataclass(frozen=True, slots=True)
class Record:
    """The losses and gradient norms of a trial's steps. `is_own`: whether flagcore's trial program wrote them."""

    losses: Sequence[float | None]
    norms: Sequence[float | None]
    is_own: bool = False


def program_record(folder: str) -> Record:
    """Return the steps that a trial program has written."""
    losses, norms = list[float | None](), list[float | None]()
    with suppress(OSError, *INVALID_JSON):
        for line in read_regular(Path(folder, STEPS)).decode().splitlines():
            step = json.loads(line)
            losses.append(step["loss"])
            norms.append(step["grad_norm"])
    return Record(losses, norms, is_own=True)


def compared(task: Task, change: str, own: Record, base: Record) -> Answers | None:
    """Return the difference of a trial to the baseline that is largest relative to its limit; None without losses.

    `change`: as in `Engine.answers`. Raises FlagError if the loss is constant, or if answers change and no loss is
    known.
    """
    if len(own.losses) > 2 and len({*own.losses}) == 1 < len({*base.losses}):
        raise FlagError(f"the loss is {own.losses[0]} in all steps: no step changes the parameters")
    found = list(_differences(task, change, own, base))
    if not found and change == CHANGES:
        raise FlagError("its knobs change answers, and the logs of it and the baseline state no loss to compare")
    return max(found, key=lambda each: each.difference / each.limit, default=None)


def _differences(task: Task, change: str, own: Record, base: Record) -> Iterator[Answers]:
    count, limit = min(len(own.losses), len(base.losses)), task.spec.control.answers or 1e-9
    has_seeds = change == SEEDS and not base.is_own
    if count:
        most = max(limit, _spread(base.losses)) if has_seeds else limit
        yield from _difference("loss", own.losses, base.losses, count - 1, (1.0, most), N_("of the loss"))
    if change == CHANGES or not base.is_own:
        if not has_seeds:
            norms = own.norms, base.norms
            yield from _difference("gradient norm", *norms, 0, (1.0, NORMS * limit), N_("of the gradient norm"))
        return
    noises = NOISE.get(task.spec.train.precision, USUAL_NOISE)
    figures = {"loss": (own.losses, base.losses), "gradient norm": (own.norms, base.norms)}
    for (name, (mine, theirs)), least in zip(figures.items(), noises, strict=True):
        unit = max(least, _relative(*theirs[:2]) if len(theirs) > 1 else 0.0)
        for step in range(min(count, 2)):
            yield from _difference(name, mine, theirs, step, (unit, MOST_NOISES), N_("of the engine's own noise"))


def _difference(
    name: str,
    own: Sequence[float | None],
    base: Sequence[float | None],
    step: int,
    scale: tuple[float, float],
    unit: str,
) -> Iterator[Answers]:
    """Yield the difference of a figure in a step, if both trials have it. `scale`: one unit, and the limit in units."""
    if len(own) > step and len(base) > step and own[step] is not None and base[step] is not None:
        text = f"{name} {own[step]:.6g} instead of {base[step]:.6g} in step {step + 1}"
        relative = _relative(base[step], own[step])
        yield Answers(difference=relative / scale[0], limit=scale[1], unit=unit, text=text)


def _spread(losses: Sequence[float | None]) -> float:
    """Return half the range of the changes of a loss from step to step, relative to the last loss.

    With other samples, or other initial weights, losses differ by as much.
    """
    known = [each for each in losses if each]
    changes = [after - before for before, after in itertools.pairwise(known)]
    return (max(changes) - min(changes)) / 2.0 / known[-1] if changes else 0.0


def _relative(first: float | None, second: float | None) -> float:
    """Return the difference of two figures relative to the first one. 0 if one is unknown."""
    return abs(second / first - 1.0) if first and second is not None else 0.0
