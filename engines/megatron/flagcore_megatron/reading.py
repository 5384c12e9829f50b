"""Reads the results of a trial: the files of the trial program, or the log of a user's own command.

Sources: Megatron-LM core_v0.16 `training/training.py` (`training_log`), `training/utils.py` (`report_memory`) and
`training/arguments.py` (`_print_args`); torch 2.13 `distributed/elastic/multiprocessing` for the prefixes of ranks.
"""

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flagcore.domain.chip import SPEED_TEST
from flagcore.domain.files import open_regular, read_regular
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement, TrialState, warmup_of_fewer, warmup_steps
from flagcore.spec.plain_data import package_yaml
from flagcore.vendorkit.results import METRICS, NoMetrics, interquartile_range, read_metrics
from flagcore_megatron.mixed.trials import as_asked, devices_of
from flagcore_megatron.space.knobs import BY_NAME
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT

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
"""Maximum plausible memory in MiB (1 PiB). Lines that report more are ignored."""
LONGEST_LINE = 4096
LARGEST_LOG = 64 << 20
"""Maximum number of bytes that are read of one log. The rest is ignored."""
MAX_FILES = 1024
LOGS = ("stdout.log", "stderr.log")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One iteration as logged. `losses` is empty if no loss was logged, and contains None for each loss that is not
    finite.

    `skipped` is whether the step did not update the weights.
    """

    seconds: float
    losses: tuple[float | None, ...]
    skipped: bool


@dataclass(slots=True)
class MegatronLog:
    """The metrics of one run: its steps by iteration, the maximum peak bytes of all ranks, and printed arguments."""

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
        """The logged losses of all steps; None for a loss that is not finite."""
        return [loss for step in self.steps.values() for loss in step.losses]


def log_files(folder: str) -> list[Path]:
    """Return the logs of a trial: its own, and those that torchrun wrote into subfolders for each rank."""
    trial_logs, rank_logs = [Path(folder, name) for name in LOGS], list[Path]()
    with suppress(OSError):
        for file in Path(folder).glob("**/*.log"):
            if file.name in LOGS and file not in trial_logs and len(rank_logs) < MAX_FILES:
                rank_logs.append(file)
    return [*trial_logs, *sorted(rank_logs)]


def read_logs(folder: str) -> MegatronLog:
    """Return the metrics in the logs of a trial. Invalid bytes and missing files are ignored."""
    log = MegatronLog()
    for file in log_files(folder):
        read_on(file, 0, log, unfinished=True)
    return log


def read_on(file: Path, offset: int, log: MegatronLog, *, unfinished: bool = False) -> int:
    """Add the lines of `file` from byte `offset` on to `log`, and return the offset for the next call.

    A last line without a line break is left for the next call. With `unfinished`, it is read, too.
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
    """Add one line to `log`. If several ranks print an iteration, it is added only once."""
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


RANK_PREFIX = r"^(?:\[[\w:]+\]:\s*)*"
"""Matches the prefixes that torchrun and torch add to a line of a rank: `[default0]:[rank0]: `."""
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
SEARCH_INTERVAL_SECONDS = 2.0
"""Seconds between two searches for new log files."""
INVALID_JSON = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions that may be raised when the JSON of another program is read."""


def progress(task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
    """Return a function that returns the seconds of each step that a running trial has finished so far."""
    if task.spec.train.command is not None:
        return CommandProgress(folder)
    return partial(program_progress, folder)


def read(task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
    """Return the measurement of a trial. Raises NoMetrics if there are no metrics."""
    if task.spec.train.command is not None:
        return _read_command(task, candidate, folder)
    return _read_program(task, candidate, folder, partial=partial)


def program_progress(folder: str) -> tuple[float, ...]:
    """Return the seconds of the steps that flagcore's trial program has finished so far."""
    return tuple(step["step_time_s"] for step in _steps(Path(folder, STEPS)))


class CommandProgress:
    """A callable that returns the seconds of the steps that a user's command has logged. Each line is read once."""

    def __init__(self, folder: str) -> None:
        self._folder, self._log = folder, MegatronLog()
        self._places: dict[Path, int] = {}
        self._look_again = 0.0

    def __call__(self) -> tuple[float, ...]:
        if time.monotonic() >= self._look_again:
            self._places = {file: self._places.get(file, 0) for file in log_files(self._folder)}
            self._look_again = time.monotonic() + SEARCH_INTERVAL_SECONDS
        for file, place in self._places.items():
            self._places[file] = read_on(file, place, self._log)
        return tuple(self._log.step_times_s)


def step_limit(task: Task) -> int | None:
    """Return the number of steps after which a user's command is stopped, or None for flagcore's own program."""
    train, control = task.spec.train, task.spec.control
    return control.train_iters if train.command is not None else None


def _read_program(task: Task, candidate: Candidate, folder: str, *, partial: bool) -> Measurement:
    if partial:
        steps = _steps(Path(folder, STEPS))
        return measurement(task, [step["step_time_s"] for step in steps], losses=[step["loss"] for step in steps])
    data = read_metrics(folder)
    try:
        ranks: list[dict[str, Any]] = data["ranks"]
        of_ranks = devices_of(task, candidate)
        return measurement(
            task,
            [float(step["step_time_s"]) for step in data["steps"]],
            losses=[_loss(step) for step in data["steps"]],
            peak_allocated_bytes=_max_over_ranks(ranks, "peak_allocated_bytes"),
            peak_reserved_bytes=_max_over_ranks(ranks, "peak_reserved_bytes"),
            device_used_bytes=_max_over_ranks(ranks, "device_used_bytes"),
            effective=as_asked(task, candidate, dict(_program_values(candidate, data["effective"]))),
            versions={name: str(version) for name, version in data["versions"].items()},
            devices=tuple(
                {"device": of_ranks.get(rank["rank"], int(rank["rank"])), SPEED_TEST: float(rank[SPEED_TEST])}
                for rank in ranks
                if rank.get(SPEED_TEST) is not None
            ),
        )
    except INVALID_JSON as error:
        raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None


def _read_command(task: Task, candidate: Candidate, folder: str) -> Measurement:
    log = read_logs(folder)
    steps = list(log.steps.values())
    warmup = warmup_steps([step.seconds for step in steps], task.spec.control.warmup_iters)
    warmup = warmup_of_fewer(len(steps), warmup)
    counted = [step for step in steps[warmup:] if not step.skipped]
    if len(steps) > warmup and not counted:
        raise NoMetrics(f"all {len(steps) - warmup} steps after the warm-up were skipped: the loss scale overflows")
    return measurement(
        task,
        [step.seconds for step in (*steps[:warmup], *counted)],
        warmup,
        losses=log.losses,
        peak_allocated_bytes=log.peak_allocated_bytes,
        peak_reserved_bytes=log.peak_reserved_bytes,
        effective=_command_values(candidate, log),
    )


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
    if not all(isinstance(step, float) and math.isfinite(step) and step > 0 for step in measured_times_s):
        raise NoMetrics("a step time is not a positive number")
    median = statistics.median(measured_times_s)
    tokens = spec.train.global_batch_size * spec.train.seq_length
    if not math.isfinite(tokens / median):
        raise NoMetrics(f"a step time of {median} s is too small")
    losses = tuple(figures.pop("losses"))
    return Measurement(
        step_times_s=measured_times_s,
        step_time_s=median,
        spread_s=interquartile_range(measured_times_s),
        tokens_per_second_per_device=tokens / median / task.cluster.devices,
        losses=losses,
        warmup_steps=warmup if len(step_times_s) < control.train_iters else None,
        **figures,
    )


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


def _program_values(candidate: Candidate, effective: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each knob and setting with which the trial program ran. Settings that the candidate
    leaves to the engine are omitted."""
    candidate_values = candidate.as_dict()
    for name, value in effective.items():
        is_setting = name in candidate_values and name in BY_NAME and BY_NAME[name].comparable
        if not is_setting:
            yield name, value
        elif value is not None and candidate_values[name] is not None:
            yield name, ",".join(sorted(value)) if isinstance(value, list) else value


def _command_values(candidate: Candidate, log: MegatronLog) -> dict[str, KnobValue]:
    """Return the values that Megatron printed for the candidate's knobs, with the types of the candidate's values.
    Megatron prints a derived split as a layout, which includes the virtual stages."""
    effective: dict[str, KnobValue] = {}
    derived = (LAYERS_PER_VIRTUAL,) if candidate.as_dict().get(SPLIT) == "balanced" else ()
    for name, candidate_value in candidate.items:
        knob = BY_NAME.get(name)
        printed = log.arguments.get(PRINTED_NAMES.get(name, name), log.arguments.get(name))
        left_open = knob is not None and knob.comparable and (candidate_value is None or knob.kind == "text")
        if printed is None or left_open or name in derived:
            continue
        if isinstance(candidate_value, bool):
            effective[name] = printed == "True"
        elif printed == "None":
            effective[name] = None
        elif not printed.startswith("["):
            effective[name] = int(printed) if printed.isdecimal() else DTYPES.get(printed, printed)
        elif "<" not in printed:  # skips a list of enum members, <CudaGraphScope...>
            effective[name] = ",".join(sorted(re.findall(r"\w+", printed)))
    if (batch := log.arguments.get("global_batch_size", "")).isdecimal():
        effective["global_batch_size"] = int(batch)
    return effective


PRINTED_NAMES = {"fp8_format": "fp8", "cuda_graph_scope": "cuda_graph_modules"}
"""Settings that Megatron prints under another name."""
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
