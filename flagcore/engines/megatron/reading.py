"""Reads what a trial wrote: the files of the trial program, or the log of a user's own command."""

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
from flagcore.engines.megatron.knobs import BY_NAME
from flagcore.engines.megatron.logs import MegatronLog, log_files, read_logs, read_on
from flagcore.engines.megatron.split import EACH, SPLIT
from flagcore.engines.results import METRICS, NoMetrics, interquartile_range, read_metrics
from flagcore.files import read_regular

STEPS = "steps.jsonl"
NEW_FILES_SECONDS = 2.0
"""Seconds between two looks for new logs of ranks."""
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
    return _read_program(task, candidate, folder, partial=partial)


def program_progress(folder: str) -> tuple[float, ...]:
    """Return the seconds of the steps that the trial program has finished."""
    return tuple(step["step_time_s"] for step in _steps(Path(folder, STEPS)))


class CommandProgress:
    """Reads the seconds of the steps that a user's command has printed. Each line is read once."""

    def __init__(self, folder: str) -> None:
        self._folder, self._log = folder, MegatronLog()
        self._places: dict[Path, int] = {}
        self._look_again = 0.0

    def __call__(self) -> tuple[float, ...]:
        if time.monotonic() >= self._look_again:
            self._places = {file: self._places.get(file, 0) for file in log_files(self._folder)}
            self._look_again = time.monotonic() + NEW_FILES_SECONDS
        for file, place in self._places.items():
            self._places[file] = read_on(file, place, self._log)
        return tuple(self._log.step_times_s)


def step_limit(task: Task) -> int | None:
    """Return after how many steps a user's command is stopped; flagcore's own program ends by itself."""
    train, control = task.spec.train, task.spec.control
    return control.train_iters if train.command is not None else None


def _read_program(task: Task, candidate: Candidate, folder: str, *, partial: bool) -> Measurement:
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
            effective=dict(_of_program(candidate, data["effective"])),
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
    log, warmup = read_logs(log_files(folder)), task.spec.control.warmup_iters
    steps = list(log.steps.values())
    counted = [step for step in steps[warmup:] if not step.skipped]
    if len(steps) > warmup and not counted:
        raise NoMetrics(f"all {len(steps) - warmup} steps after the warm-up were skipped: the loss scale does not fit")
    return measurement(
        task,
        [step.seconds for step in (*steps[:warmup], *counted)],
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


def _of_program(candidate: Candidate, effective: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the trial program ran, without settings that the candidate leaves to the engine; lists as texts."""
    wanted = candidate.as_dict()
    for name, value in effective.items():
        is_setting = name in wanted and name in BY_NAME and BY_NAME[name].comparable
        if not is_setting:
            yield name, value
        elif value is not None and wanted[name] is not None:
            yield name, ",".join(sorted(value)) if isinstance(value, list) else value


def _effective(candidate: Candidate, log: MegatronLog) -> dict[str, KnobValue]:
    """Return the values that Megatron printed for the candidate's knobs, in the candidate's own types.

    A derived split is printed as its layout, which has the virtual stages, too.
    """
    effective: dict[str, KnobValue] = {}
    derived = (EACH,) if candidate.as_dict().get(SPLIT) == "balanced" else ()
    for name, wanted in candidate.items:
        knob = BY_NAME.get(name)
        printed = log.arguments.get(PRINTED.get(name, name), log.arguments.get(name))
        left_open = knob is not None and knob.comparable and (wanted is None or knob.kind == "text")
        if printed is None or left_open or name in derived:
            continue
        if isinstance(wanted, bool):
            effective[name] = printed == "True"
        elif printed == "None":
            effective[name] = None
        elif not printed.startswith("["):
            effective[name] = int(printed) if printed.isdecimal() else DTYPES.get(printed, printed)
        elif "<" not in printed:  # which a list of an enumeration's members has
            effective[name] = ",".join(sorted(re.findall(r"\w+", printed)))
    if (batch := log.arguments.get("global_batch_size", "")).isdecimal():
        effective["global_batch_size"] = int(batch)
    return effective


PRINTED = {"fp8_format": "fp8", "cuda_graph_scope": "cuda_graph_modules"}
"""Names under which Megatron prints settings."""
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
