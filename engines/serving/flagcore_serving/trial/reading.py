"""Reads the results of a trial: all load points, and the load point that determines the measurement."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flagcore_vendorkit.metrics import METRICS, NoMetrics, interquartile_range, read_metrics

from flagcore.domain.metrics import HIGHEST_LOAD, PER_DEVICE, HighestLoad
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Task, figure_name, is_rate, seconds
from flagcore.domain.trial import Measurement, Trial, TrialState
from flagcore_serving.job import Rates
from flagcore_serving.model.speculation import USUAL, tokens_per_iteration
from flagcore_serving.space.hardware import Hardware
from flagcore_serving.space.knobs import CONTEXT, DRAFTED, SPECULATION

INVALID_METRICS = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that reading invalid metrics may raise."""
GOODPUT = "goodput_requests_per_s"
LOAD_KEYS = ("concurrency", "request_rate", "input_len", "output_len")
"""Keys that identify a load point in `Measurement.points`."""


def read(task: Task, candidate: Candidate, folder: str, instance_devices: Sequence[int]) -> Measurement:
    """Return the measurement of a trial. `instance_devices`: the number of devices of each instance.

    A metric is the median of its repeats. The spread is at least the uncertainty of a load that ended early. Memory in
    use is known only on CPU cores: it is the resident memory per core of the fullest instance. Raises NoMetrics.

    With several load points, one point determines the result. For a rate, this is the best point that meets the SLO or,
    if none does, the point that comes closest. For a latency, this is the point that misses the SLO the most or, if all
    meet the SLO, the slowest point: otherwise the lightest load would always win.
    """
    data, devices = read_metrics(folder), max(1, min(sum(instance_devices), task.cluster.devices))
    on_cores = Hardware.of(task).on_cores
    try:
        points = [_Point(task, point, devices) for point in data["points"]]
        select = min if is_rate(task.spec.objective) else max
        point = select(points, key=lambda point: (point.excess, point.step_s))
        startup_figures = {name: float(value) for name, value in data["counters"].items()}
        startup_figures["startup_s"] = max(map(float, data["startup_s"]))
        memory = _memory(data, instance_devices if on_cores else [1] * len(instance_devices))
        return Measurement(
            step_times_s=point.steps_s,
            step_time_s=point.step_s,
            spread_s=max(interquartile_range(point.steps_s), point.error * point.step_s),
            tokens_per_second_per_device=point.figures["total_tokens_per_s"] / devices,
            effective=_effective(candidate, data),
            versions={name: str(version) for name, version in data["versions"].items()},
            device_used_bytes=_resident_bytes(data, instance_devices) if on_cores else None,
            figures=point.figures | startup_figures | memory,
            points=tuple(point.as_record() for point in points),
            partial=bool(data.get("partial")),
            highest=HighestLoad(**data["highest"]) if data.get("highest") else None,
            broken=point.broken,
            notes=point.notes,
        )
    except INVALID_METRICS as error:
        raise NoMetrics(f"{METRICS} is incomplete ({type(error).__name__}: {error})") from None


class _Point:
    """One load point. `excess`: the factor by which it misses the SLO; 1 if it meets the SLO."""

    def __init__(self, task: Task, data: Mapping[str, Any], devices: int) -> None:
        self.load: Mapping[str, Any] = data["load"]
        repeats = [{name: float(value) for name, value in repeat["figures"].items()} for repeat in data["repeats"]]
        for figures in repeats:
            figures[PER_DEVICE] = figures["output_tokens_per_s"] / devices
        self.notes = tuple(dict.fromkeys(str(note) for repeat in data["repeats"] for note in repeat.get("notes", ())))
        self.error = max(float(repeat.get("error", 0.0)) for repeat in data["repeats"])
        counts = [repeat.get("completed") for repeat in data["repeats"]]
        self.answered = min(counts) if all(isinstance(each, int) for each in counts) else None
        names = [name for name in repeats[0] if all(name in each for each in repeats)]
        self.figures = {name: statistics.median(each[name] for each in repeats) for name in names}
        if highest := task.spec.serve.highest:
            self.figures[HIGHEST_LOAD] = float(self.load[highest])
        self.steps_s = _steps_s(task.spec.objective, repeats, counts)
        self.step_s = statistics.median(self.steps_s)
        excess = {name: self.figures.get(name, math.inf) / limit for name, limit in task.spec.work.slo.items()}
        self.excess = max(1.0, *excess.values()) if excess else 1.0
        limits = {name: limit for name, limit in task.spec.work.slo.items() if excess[name] > 1.0}
        seen = {name: f"{self.figures[name]:.4g} s" if name in self.figures else "not measured" for name in limits}
        self.broken = tuple(f"{name} is {seen[name]}, over {limit:g} s" for name, limit in limits.items())

    def as_record(self) -> dict[str, Any]:
        load = {key: self.load[key] for key in LOAD_KEYS if self.load.get(key) is not None}
        return load | ({} if self.answered is None else {"answered": self.answered}) | self.figures


def _steps_s(objective: str, repeats: Sequence[Mapping[str, float]], counts: Sequence[object]) -> tuple[float, ...]:
    """Return the objective of each repeat in seconds. `counts`: the answers of each repeat. Raises NoMetrics and
    INVALID_METRICS."""
    name = figure_name(objective)
    if not all(name in each for each in repeats):
        raise KeyError(f"{name} was not measured")
    figures = [each[name] or _minimal_goodput(name, each, count) for each, count in zip(repeats, counts, strict=True)]
    if name.startswith(("tpot_s", "itl_s")) and not all(figures):
        reason = "all tokens of a request arrived together: the client is too slow, or the answers are too short"
        raise NoMetrics(f"{name} is 0; {reason}")
    steps_s = tuple(seconds(objective, figure) for figure in figures)
    if not all(math.isfinite(step) and step > 0 for step in steps_s):
        raise ValueError(f"{name} is not a positive number")
    return steps_s


def _minimal_goodput(name: str, figures: Mapping[str, float], answer_count: object) -> float:
    """Return a goodput of half a request within the SLO, so that loads without any such request can be compared.
    Returns 0 for other metrics than goodput."""
    if name != GOODPUT or not isinstance(answer_count, int) or answer_count < 1:
        return 0.0
    return figures["requests_per_s"] / (2 * answer_count)


def _effective(candidate: Candidate, data: Mapping[str, Any]) -> dict[str, object]:
    """Return the knob values that the servers used. The name of a knob tells if the engine chose its value."""
    unset = {knob for knob, value in candidate.items if value is None or (knob == CONTEXT and value == -1)}
    return {
        (f"{knob} (the engine's own choice)" if knob in unset else knob): value
        for knob, value in dict(data["effective"]).items()
    }


def _resident_bytes(data: Mapping[str, Any], core_counts: Sequence[int]) -> int | None:
    """Return the resident memory per core of the fullest instance in bytes, or None if it is unknown."""
    resident = zip(data.get("resident_bytes", ()), core_counts, strict=False)
    shares = [bytes_ / max(cores, 1) for bytes_, cores in resident]
    return int(max(shares, default=0)) or None


def _memory(data: Mapping[str, Any], instance_devices: Sequence[int]) -> dict[str, float]:
    """Return the memory that the engines report, by metric: GiB on the fullest device, and tokens of all instances."""
    reported: dict[str, list[float]] = {}
    for memory, devices in zip(data.get("memory", ()), instance_devices, strict=False):
        for name, value in memory.items():
            reported.setdefault(name, []).append(float(value) / (max(devices, 1) if name.endswith("_gib") else 1))
    return {name: max(values) if name.endswith("_gib") else sum(values) for name, values in reported.items()}


ACCEPTED_AT = "acceptance_at_{position}"
"""The share of drafts in which the token at a position is accepted. With n-grams and suffixes, iterations may have no
draft, so that it is not the share of iterations."""
ROUNDING = 0.01
"""The acceptance is rounded to multiples of this, so that smaller differences do not change predictions."""


def with_measured_acceptance(task: Task, trials: Sequence[Trial], schemes: Mapping[str, str]) -> Task:
    """Return the task with the median acceptance of each scheme in its trials, or the unchanged task if no trial has
    one. `schemes`: as in `Program`."""
    found: dict[str, list[Rates]] = {}
    for trial in trials:
        values = trial.candidate.as_dict()
        drafted, scheme = values.get(DRAFTED), schemes.get(str(values.get(SPECULATION)), "")
        if trial.state is not TrialState.MEASURED or trial.measurement is None or not isinstance(drafted, int):
            continue
        if rates := _rates(trial.measurement.figures, drafted, scheme):
            found.setdefault(scheme, []).append(rates)
    if not found:
        return task
    known = {scheme: _median(each) for scheme, each in found.items()}
    serve = task.spec.serve
    loads = tuple(replace(load, acceptance=tuple({**dict(load.acceptance), **known}.items())) for load in serve.loads)
    return replace(task, spec=replace(task.spec, work=replace(serve, loads=loads)))


def _rates(figures: Mapping[str, float], drafted: int, scheme: str) -> Rates:
    """Return the measured acceptance of a scheme: by position if it is known, else one rate. Empty without any."""
    if drafted <= 0:
        return ()
    positions = [figures.get(ACCEPTED_AT.format(position=place + 1)) for place in range(drafted)]
    if scheme in USUAL and None not in positions:
        return tuple(float(each or 0.0) for each in positions)
    tokens = _tokens_per_iteration(figures)
    return () if tokens is None else (acceptance(tokens, drafted),)


def _median(measured: Sequence[Rates]) -> Rates:
    """Return the median of each position over the trials that know as many positions as any."""
    most = max(map(len, measured))
    columns = zip(*(each for each in measured if len(each) == most), strict=True)
    return tuple(round(statistics.median(each) / ROUNDING) * ROUNDING for each in columns)


def _tokens_per_iteration(figures: Mapping[str, float]) -> float | None:
    """Return the mean number of tokens that a sequence gets in one iteration, or None if it is unknown.

    Each iteration yields one token of the model itself and the accepted drafts. The mean includes iterations without
    drafts, which are frequent with n-grams and do not show in the acceptance rate that engines report.
    """
    if (share := figures.get("drafted_share")) is not None and share < 1.0:
        return 1.0 / (1.0 - share)
    return figures.get("tokens_per_iteration")


def acceptance(tokens: float, drafted: int) -> float:
    """Return the probability that a drafted token is accepted if all drafted tokens before it are.

    This is the inverse of `tokens_per_iteration`. `tokens`: the mean number of tokens that an iteration with `drafted`
    drafted tokens yields.
    """
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_iteration((middle,), drafted) < tokens else (low, middle)
    return high
