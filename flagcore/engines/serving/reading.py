"""From what a trial left in its folder to a measurement: the load point that is told, and all of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.objective import figure_name, is_rate, seconds
from flagcore.domain.spec import Task
from flagcore.domain.trial import Measurement
from flagcore.engines.serving.common.place import Place
from flagcore.engines.serving.trial.job import METRICS, NOT_AS_AGREED
from flagcore.errors import FlagError
from flagcore.files import read_regular

GOODPUT = "goodput_requests_per_s"
PER_DEVICE = "output_tokens_per_s_per_device"
LOAD_KEYS = ("concurrency", "request_rate", "input_len", "output_len")
"""What tells load points apart in a measurement's `points`."""


class NoMetrics(FlagError):
    """A trial ended without the figures that it should have left."""


def read(task: Task, candidate: Candidate, folder: str, each: Sequence[int]) -> Measurement:
    """Return what the trial program measured of a candidate whose instances compute with so many devices `each`.

    A figure is the median of its repeats. Of several load points one is told: for a rate the best among those that keep
    the SLO, or, if none does, the one that misses it by least; for a latency, which the lightest load would always win,
    the one that misses the SLO by most, or, if none does, where it is longest. Memory in use is known on cores: what
    the processes of the fullest instance have resident, a core's share of it, as it is predicted. Raises NoMetrics.
    """
    data, devices = _metrics(Path(folder, METRICS)), max(1, min(sum(each), task.cluster.devices))
    on_cores = Place.of(task).on_cores
    try:
        points = [_Point(task, point, devices) for point in data["points"]]
        pick = min if is_rate(task.spec.objective) else max
        told = pick(points, key=lambda point: (point.missed, point.step_s))
        return Measurement(
            step_times_s=told.steps_s,
            step_time_s=told.step_s,
            spread_s=_spread(told.steps_s),
            tokens_per_second_per_device=told.figures["total_tokens_per_s"] / devices,
            effective=_effective(candidate, data),
            versions={name: str(version) for name, version in data["versions"].items()},
            device_used_bytes=_resident(data, each) if on_cores else None,
            figures=told.figures | _counted(data) | _memory(data, each if on_cores else [1] * len(each)),
            points=tuple(point.plain() for point in points),
            broken=told.broken,
        )
    except NOT_AS_AGREED as error:
        raise NoMetrics(f"{METRICS} is not complete ({type(error).__name__}: {error})") from None


class _Point:
    """One load point. `missed` is by which factor it misses the SLO, 1 where it keeps it."""

    def __init__(self, task: Task, data: Mapping[str, Any], devices: int) -> None:
        self.load: Mapping[str, Any] = data["load"]
        repeats = [_figures(repeat["figures"], devices) for repeat in data["repeats"]]
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
        graded = [each[name] or _of_none(name, each, count) for each, count in zip(repeats, counts, strict=True)]
        if name.startswith(("tpot_s", "itl_s")) and not all(graded):
            why = "its tokens were read at one moment: the client came late, or the answers are too short to tell"
            raise NoMetrics(f"{name} is 0; {why}")
        self.steps_s = tuple(seconds(objective, figure) for figure in graded)
        if not all(math.isfinite(step) and step > 0 for step in self.steps_s):
            raise ValueError(f"{name} is not a positive number")
        self.step_s = statistics.median(self.steps_s)
        over = {name: self.figures.get(name, math.inf) / limit for name, limit in task.spec.limits.items()}
        self.missed = max(1.0, *over.values()) if over else 1.0
        self.broken = tuple(_words(name, self.figures, task.spec.limits[name]) for name in over if over[name] > 1.0)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data: the load, then its figures."""
        load = {key: self.load[key] for key in LOAD_KEYS if self.load.get(key) is not None}
        return load | ({} if self.answered is None else {"answered": self.answered}) | self.figures


def _figures(given: Mapping[str, Any], devices: int) -> dict[str, float]:
    figures = {name: float(value) for name, value in given.items()}
    return figures | {PER_DEVICE: figures["output_tokens_per_s"] / devices}


def _of_none(name: str, figures: Mapping[str, float], answered: object) -> float:
    """Return what compares a load none of whose requests was good: half a request of all that were answered."""
    if name != GOODPUT or not isinstance(answered, int) or answered < 1:
        return 0.0
    return figures["requests_per_s"] / (2 * answered)


def _words(name: str, figures: Mapping[str, float], limit: float) -> str:
    known = f"{figures[name]:.4g} s" if name in figures else "not measured"
    return f"{name} is {known}, over {limit:g} s"


def _effective(candidate: Candidate, data: Mapping[str, Any]) -> dict[str, object]:
    """Return what the servers said they use; the engine's own choice for a knob that was left to it is named so."""
    asked = candidate.as_dict()
    return {
        (f"{knob} (the engine's own choice)" if knob in asked and asked[knob] is None else knob): value
        for knob, value in dict(data["effective"]).items()
    }


def _counted(data: Mapping[str, Any]) -> dict[str, float]:
    """Return what explains a score: the servers' counters, and how long the slowest took to start."""
    counters = {name: float(value) for name, value in data["counters"].items()}
    return {**counters, "startup_s": max(float(each) for each in data["startup_s"])}


def _resident(data: Mapping[str, Any], each: Sequence[int]) -> int | None:
    """Return the resident bytes of a core of the fullest instance; None where the system did not tell."""
    shares = [bytes_ / max(cores, 1) for bytes_, cores in zip(data.get("resident_bytes", ()), each, strict=False)]
    return int(max(shares, default=0)) or None


def _memory(data: Mapping[str, Any], parts: Sequence[int]) -> dict[str, float]:
    """Return what engines say of memory: GiB of the fullest device, an instance's over so many, and all tokens."""
    told: dict[str, list[float]] = {}
    for memory, devices in zip(data.get("memory", ()), parts, strict=False):
        for name, value in memory.items():
            told.setdefault(name, []).append(float(value) / (max(devices, 1) if name.endswith("_gib") else 1))
    return {name: max(values) if name.endswith("_gib") else sum(values) for name, values in told.items()}


def _spread(steps_s: Sequence[float]) -> float:
    """Return the interquartile range, 0 for one repeat."""
    if len(steps_s) < 2:
        return 0.0
    quarters = statistics.quantiles(steps_s, n=4, method="inclusive")
    return quarters[2] - quarters[0]


def _metrics(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_regular(file))
    except FileNotFoundError:
        raise NoMetrics(f"it ended with exit code 0 but wrote no {METRICS}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise NoMetrics(f"{METRICS} cannot be read ({type(error).__name__})") from None
    if not isinstance(data, dict):
        raise NoMetrics(f"{METRICS} is not an object")
    return data
