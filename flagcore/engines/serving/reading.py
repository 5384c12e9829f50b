"""Reads what a trial left in its folder: all load points, and the one that counts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.objective import figure_name, is_rate, seconds
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement
from flagcore.engines.results import METRICS, NoMetrics, interquartile_range, read_metrics
from flagcore.engines.serving.common.hardware import Hardware

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading other JSON than that of the trial program may raise."""
GOODPUT = "goodput_requests_per_s"
PER_DEVICE = "output_tokens_per_s_per_device"
LOAD_KEYS = ("concurrency", "request_rate", "input_len", "output_len")
"""The keys that identify a load point in a measurement's `points`."""


def read(task: Task, candidate: Candidate, folder: str, each: Sequence[int]) -> Measurement:
    """Return the measurement of the trial program. `each` has the devices of each instance.

    A figure is the median of its repeats. Of several load points one counts: for a rate the best among those that keep
    the SLO, or, if none does, the nearest to it; for a latency, which the lightest load would always win, the one that
    misses the SLO by most, or, if none does, the slowest. Memory in use is known on CPU cores: the resident memory of
    the fullest instance, per core, as it is predicted. Raises NoMetrics.
    """
    data, devices = read_metrics(folder), max(1, min(sum(each), task.cluster.devices))
    on_cores = Hardware.of(task).on_cores
    try:
        points = [_Point(task, point, devices) for point in data["points"]]
        pick = min if is_rate(task.spec.objective) else max
        chosen = pick(points, key=lambda point: (point.missed, point.step_s))
        started = {name: float(value) for name, value in data["counters"].items()}
        started["startup_s"] = max(map(float, data["startup_s"]))
        return Measurement(
            step_times_s=chosen.steps_s,
            step_time_s=chosen.step_s,
            spread_s=interquartile_range(chosen.steps_s),
            tokens_per_second_per_device=chosen.figures["total_tokens_per_s"] / devices,
            effective=_effective(candidate, data),
            versions={name: str(version) for name, version in data["versions"].items()},
            device_used_bytes=_resident(data, each) if on_cores else None,
            figures=chosen.figures | started | _memory(data, each if on_cores else [1] * len(each)),
            points=tuple(point.plain() for point in points),
            broken=chosen.broken,
        )
    except MALFORMED as error:
        raise NoMetrics(f"{METRICS} is incomplete ({type(error).__name__}: {error})") from None


class _Point:
    """One load point. `missed` is by which factor it misses the SLO, 1 where it keeps it."""

    def __init__(self, task: Task, data: Mapping[str, Any], devices: int) -> None:
        self.load: Mapping[str, Any] = data["load"]
        repeats = [{name: float(value) for name, value in repeat["figures"].items()} for repeat in data["repeats"]]
        for figures in repeats:
            figures[PER_DEVICE] = figures["output_tokens_per_s"] / devices
        counts = [repeat.get("completed") for repeat in data["repeats"]]
        self.answered = min(counts) if all(isinstance(each, int) for each in counts) else None
        self.figures = {
            name: statistics.median(each[name] for each in repeats)
            for name in repeats[0]
            if all(name in each for each in repeats)
        }
        objective = task.spec.objective
        name = figure_name(objective)
        if name not in self.figures:
            raise KeyError(f"{name} was not measured")
        graded = [
            each[name] or _without_good_requests(name, each, count) for each, count in zip(repeats, counts, strict=True)
        ]
        if name.startswith(("tpot_s", "itl_s")) and not all(graded):
            why = "all its tokens arrived together: the client was late, or the answers are too short"
            raise NoMetrics(f"{name} is 0; {why}")
        self.steps_s = tuple(seconds(objective, figure) for figure in graded)
        if not all(math.isfinite(step) and step > 0 for step in self.steps_s):
            raise ValueError(f"{name} is not a positive number")
        self.step_s = statistics.median(self.steps_s)
        over = {name: self.figures.get(name, math.inf) / limit for name, limit in task.spec.limits.items()}
        self.missed = max(1.0, *over.values()) if over else 1.0
        self.broken = tuple(_words(name, self.figures, task.spec.limits[name]) for name in over if over[name] > 1.0)

    def plain(self) -> dict[str, Any]:
        load = {key: self.load[key] for key in LOAD_KEYS if self.load.get(key) is not None}
        return load | ({} if self.answered is None else {"answered": self.answered}) | self.figures


def _without_good_requests(name: str, figures: Mapping[str, float], answered: object) -> float:
    """Return a goodput for a load without good requests, so that it can be compared: half a request in all."""
    if name != GOODPUT or not isinstance(answered, int) or answered < 1:
        return 0.0
    return figures["requests_per_s"] / (2 * answered)


def _words(name: str, figures: Mapping[str, float], limit: float) -> str:
    figure = f"{figures[name]:.4g} s" if name in figures else "not measured"
    return f"{name} is {figure}, over {limit:g} s"


def _effective(candidate: Candidate, data: Mapping[str, Any]) -> dict[str, object]:
    """Return the values in use; the name of a knob that was not set says that its value is the engine's choice."""
    asked = candidate.as_dict()
    return {
        (f"{knob} (the engine's own choice)" if knob in asked and asked[knob] is None else knob): value
        for knob, value in dict(data["effective"]).items()
    }


def _resident(data: Mapping[str, Any], each: Sequence[int]) -> int | None:
    """Return the resident bytes per core of the fullest instance; None if unknown."""
    shares = [bytes_ / max(cores, 1) for bytes_, cores in zip(data.get("resident_bytes", ()), each, strict=False)]
    return int(max(shares, default=0)) or None


def _memory(data: Mapping[str, Any], parts: Sequence[int]) -> dict[str, float]:
    """Return the engines' own figures of memory: GiB on the fullest device, and tokens of all instances."""
    found: dict[str, list[float]] = {}
    for memory, devices in zip(data.get("memory", ()), parts, strict=False):
        for name, value in memory.items():
            found.setdefault(name, []).append(float(value) / (max(devices, 1) if name.endswith("_gib") else 1))
    return {name: max(values) if name.endswith("_gib") else sum(values) for name, values in found.items()}
