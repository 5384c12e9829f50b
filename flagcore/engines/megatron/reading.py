"""Reads the results of a trial: the files of the trial program, or the log of a user's own command."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.devices import SPEED_TEST
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement
from flagcore.domain.warmup import warmup_steps
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.engines.megatron.logs import MegatronLog, log_files, read_logs, read_on
from flagcore.engines.megatron.mesh_trials import as_asked, devices_of
from flagcore.engines.megatron.split import LAYERS_PER_VIRTUAL, SPLIT
from flagcore.engines.results import METRICS, NoMetrics, interquartile_range, read_metrics
from flagcore.files import read_regular

STEPS = "steps.jsonl"
SEARCH_INTERVAL_SECONDS = 2.0
"""Seconds between two searches for new log files."""
INVALID_JSON = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading the JSON of another program may raise."""


def progress(task: Task, folder: str) -> Callable[[], tuple[float, ...]]:
    """Return a function that returns the seconds of each step that a running trial has finished."""
    if task.spec.train.command is not None:
        return CommandProgress(folder)
    return partial(program_progress, folder)


def read(task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
    """Return the measurement of a trial. Raises NoMetrics."""
    if task.spec.train.command is not None:
        return _read_command(task, candidate, folder)
    return _read_program(task, candidate, folder, partial=partial)


def program_progress(folder: str) -> tuple[float, ...]:
    """Return the seconds of the steps that the trial program has finished."""
    return tuple(step["step_time_s"] for step in _steps(Path(folder, STEPS)))


class CommandProgress:
    """Returns the seconds of the steps that a user's command has printed. Each line is read once."""

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
    """Return the number of steps after which a user's command is stopped; None for flagcore's own program."""
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
    log = read_logs(log_files(folder))
    steps = list(log.steps.values())
    warmup = warmup_steps([step.seconds for step in steps], task.spec.control.warmup_iters)
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
        warmup_steps=warmup if warmup < task.spec.control.warmup_iters else None,
    )


def measurement(task: Task, step_times_s: Sequence[float], warmup: int | None = None, **figures: Any) -> Measurement:
    """Return the measurement of a run from the times of all its steps. Raises NoMetrics if all are warm-up.

    `warmup` is the number of warm-up steps; None: `warmup_iters`. The step time is the median of the steps after the
    warm-up, the spread their interquartile range.
    """
    spec = task.spec
    warmup = spec.control.warmup_iters if warmup is None else warmup
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
        **figures,
    )


def _steps(file: Path) -> list[dict[str, Any]]:
    """Read the steps of a trial that may still run; an incomplete last line is ignored."""
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
    known = [int(rank[metric]) for rank in ranks if rank.get(metric) is not None]
    return max(known) if known else None


def _program_values(candidate: Candidate, effective: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values that the trial program ran by name, without settings that the candidate leaves to the engine."""
    candidate_values = candidate.as_dict()
    for name, value in effective.items():
        is_setting = name in candidate_values and name in BY_NAME and BY_NAME[name].comparable
        if not is_setting:
            yield name, value
        elif value is not None and candidate_values[name] is not None:
            yield name, ",".join(sorted(value)) if isinstance(value, list) else value


def _command_values(candidate: Candidate, log: MegatronLog) -> dict[str, KnobValue]:
    """Return the values that Megatron printed for the candidate's knobs, in the types of the candidate's values.

    Megatron prints a derived split as a layout that includes the virtual stages.
    """
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
        elif "<" not in printed:  # a list of enum members, <CudaGraphScope...>, is skipped
            effective[name] = ",".join(sorted(re.findall(r"\w+", printed)))
    if (batch := log.arguments.get("global_batch_size", "")).isdecimal():
        effective["global_batch_size"] = int(batch)
    return effective


PRINTED_NAMES = {"fp8_format": "fp8", "cuda_graph_scope": "cuda_graph_modules"}
"""Settings that Megatron prints under another name."""
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
