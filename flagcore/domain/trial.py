"""Trials, their measurements, and the events of a run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any

from flagcore.domain.space import Candidate

ESTIMATE, PROBE, RUN = FIDELITIES = ("estimate", "probe", "run")
"""The fidelities of a trial, the cheapest first. estimate: predicted; probe: compute, optimizer and memory of single
ranks are measured on one device; run: the whole job runs on all its devices."""


class TrialState(Enum):
    """The state of a trial. Only MEASURED trials can become the best.

    PREDICTED means that the candidate was predicted and not run. STOPPED trials were clearly slower than the best.
    INVALID trials ran with other values than requested.
    """

    PREDICTED = "predicted"
    RUNNING = "running"
    MEASURED = "measured"
    STOPPED = "stopped"
    OUT_OF_MEMORY = "out_of_memory"
    INVALID = "invalid"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"

    @property
    def failed(self) -> bool:
        """Whether the trial counts as failed."""
        return self not in (TrialState.PREDICTED, TrialState.RUNNING, TrialState.MEASURED, TrialState.STOPPED)


class Role(Enum):
    """The purpose of a trial: the baseline, a candidate of the search, or a repeat at the end.

    An INTERFERENCE trial runs a measured candidate again while other trials run. An IMPORTED trial was run by another
    tool. Neither counts as a result of its candidate.
    """

    BASELINE = "baseline"
    INTERFERENCE = "interference"
    SEARCH = "search"
    REPEAT = "repeat"
    IMPORTED = "imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurement of one run, in seconds and bytes. Figures that were not measured are None.

    `step_times_s` are the step times without warm-up, in order; `spread_s` is their interquartile range. `warmup_steps`
    is the number of warm-up steps of a trial with fewer steps than planned; None: `control.warmup_iters`. For a server,
    a step time is the objective in seconds of one run of the load. `figures` are the figures of the load point that
    reports show, `points` those of all load points, `broken` describes the limits that were exceeded, and `notes` what
    makes figures uncertain. `windows` are the times (of `time.monotonic`) of that load point's runs, which are not
    stored.

    `effective` are the knob values that the engine reported. `partial` marks a trial that was stopped early. `devices`
    are the telemetry and the speed test of each device, with its number over all nodes as `device`; `slow` describes
    slow devices.

    For probes and shortened trials, `modelled_s` is the part of the step time that was not measured. `low_s` and
    `high_s` are the bounds of its 80% interval. `scaled_from` is the measured time of a shortened step, from which all
    other times are scaled to whole steps; None: the steps were whole. A trial with `few_steps` had no time for more;
    it has an interval, too.
    """

    step_times_s: tuple[float, ...]
    step_time_s: float
    spread_s: float
    tokens_per_second_per_device: float
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    losses: tuple[float | None, ...] = ()
    effective: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    telemetry: Mapping[str, float] = field(default_factory=dict)
    partial: bool = False
    modelled_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    points: tuple[Mapping[str, float], ...] = ()
    broken: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    windows: tuple[tuple[float, float], ...] = ()
    devices: tuple[Mapping[str, float], ...] = ()
    slow: tuple[str, ...] = ()
    scaled_from: float | None = None
    warmup_steps: int | None = None
    few_steps: bool = False

    @property
    def interval(self) -> float:
        """Half of the 80% interval of a step time, relative to it, if it was scaled or has too few steps; else 0."""
        has_interval = self.few_steps or self.scaled_from is not None
        if not has_interval or self.low_s is None or self.high_s is None:
            return 0.0
        return (self.high_s - self.low_s) / 2.0 / self.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The time limit of a trial, and how it was derived, in words.

    A trial that has run for `target_s` seconds ends with the steps that it has, if they are enough for a measurement;
    None: only at its limit.
    """

    seconds: float
    because: str
    target_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """Shortened steps, with `global_batch_size` samples instead of `whole`, or on `nodes` instead of `of_nodes`.

    The predicted time of a whole step is `scale` times the predicted time of a shortened one. `low` and `high` are the
    bounds of the 80% interval of this factor. On fewer nodes a device has `more_bytes` in use, and `own` is half of the
    interval relative to the time, without the part that all candidates share.
    """

    global_batch_size: int
    whole: int
    scale: float
    low: float
    high: float
    nodes: int = 0
    of_nodes: int = 0
    more_bytes: int = 0
    own: float = 0.0

    def scaled(self, measured: Measurement) -> Measurement:
        """Return a measurement of shortened steps, scaled to whole steps."""
        step = measured.step_time_s
        rate = self.whole / self.global_batch_size / self.scale
        if self.nodes:
            rate *= self.nodes / self.of_nodes
        sizes = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
        used = {name: value for name in sizes if (value := getattr(measured, name)) is not None}
        return replace(
            measured,
            **{name: max(value - self.more_bytes, 1) for name, value in used.items()},
            step_times_s=tuple(each * self.scale for each in measured.step_times_s),
            step_time_s=step * self.scale,
            spread_s=measured.spread_s * self.scale,
            tokens_per_second_per_device=measured.tokens_per_second_per_device * rate,
            modelled_s=step * (self.scale - 1.0),
            low_s=step * self.low,
            high_s=step * self.high,
            scaled_from=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run or probe of a candidate.

    `predicted` is the prediction before any trial, `believed` the corrected prediction of the strategy that chose the
    trial, for the reason `chosen_because`. `fidelity` is one of FIDELITIES. `log` is the path of its output, relative
    to the folder of the run. `source` is the file from which the trial was imported; None: flagcore ran it. `began_s`
    is the time of its start in seconds since the start of the search. `search_ended` is the reason why the search ended
    before a repeat. `time_limit` is its time limit, `shortened` describes its steps if they were shortened.

    If it ended before its last step, `finished_steps_s` are the times of its finished steps, scaled to whole ones; on
    an accelerator without the first one, which compiles kernels. `telemetry` is that of a trial without a measurement.

    An `inconclusive` trial was disturbed by other programs, or lost a host, `lost_host`, so its candidate may be tried
    again. A `warm` trial was forked from a process that had imported its modules. `group` is the number of its group of
    devices if it ran next to other trials, None if it ran alone.
    """

    number: int
    candidate: Candidate
    role: Role
    state: TrialState
    predicted: Mapping[str, object] = field(default_factory=dict)
    measurement: Measurement | None = None
    reason: str | None = None
    duration_s: float = 0.0
    log: str = ""
    fidelity: str = RUN
    source: str | None = None
    began_s: float | None = None
    chosen_because: str | None = None
    believed: Mapping[str, object] | None = None
    search_ended: str | None = None
    time_limit: TimeLimit | None = None
    shortened: Shortened | None = None
    group: int | None = None
    inconclusive: bool = False
    lost_host: str | None = None
    warm: bool = False
    finished_steps_s: tuple[float, ...] = ()
    telemetry: Mapping[str, float] = field(default_factory=dict)

    @property
    def search_fields(self) -> dict[str, object]:
        """The values of SEARCH_FIELDS that are not None, as plain data."""
        values = {name: value for name in SEARCH_FIELDS if (value := getattr(self, name)) is not None}
        records = (TimeLimit, Shortened)
        return {name: asdict(value) if isinstance(value, records) else value for name, value in values.items()}

    @property
    def scale(self) -> float:
        """The predicted time of a whole step relative to a step of the trial."""
        return self.shortened.scale if self.shortened else 1.0

    @property
    def fewer_nodes(self) -> int:
        """The number of nodes of a trial that did not run on all nodes; 0 for others."""
        return self.shortened.nodes if self.shortened else 0

    @property
    def predicted_step_s(self) -> float | None:
        """The seconds of a whole step as predicted before any trial; None if unknown."""
        return step_value(self.predicted)

    @property
    def expected_step_s(self) -> float | None:
        """The seconds of a whole step as predicted, corrected by earlier trials if possible; None if unknown."""
        return step_value(self.believed) or self.predicted_step_s

    @property
    def is_conclusive(self) -> bool:
        """Whether the candidate needs no further trial: the trial was neither interrupted nor disturbed."""
        return self.state is not TrialState.INTERRUPTED and not self.inconclusive

    @property
    def is_final(self) -> bool:
        """Whether the trial was measured alone, with whole steps or on fewer nodes."""
        if self.measurement is None or self.group is not None:
            return False
        return self.measurement.scaled_from is None or bool(self.fewer_nodes)

    @property
    def interval(self) -> float:
        """Half of the relative 80% interval of a scaled step time, without the part that all candidates share."""
        if self.shortened and self.shortened.nodes:
            return self.shortened.own
        return self.measurement.interval if self.measurement else 0.0

    @property
    def step_seen_s(self) -> float | None:
        """The measured time of a whole step, or the median of the finished steps; None without a step."""
        if self.measurement:
            return self.measurement.step_time_s
        return median(self.finished_steps_s) if self.finished_steps_s else None

    @property
    def has_only_finished_steps(self) -> bool:
        """Whether the trial has no measurement, but finished steps that show how long its steps take."""
        return self.measurement is None and bool(self.finished_steps_s) and self.predicted_step_s is not None

    def overhead_s(self, steps: int, warmup: int) -> float | None:
        """Return the seconds of a trial with steps outside of these, mostly its start; None for other trials.

        It has `steps` steps, of which `warmup` are warm-up, or fewer if it or its warm-up ended early.
        """
        measured = self.measurement
        if self.has_only_finished_steps:
            return self.duration_s - math.fsum(self.finished_steps_s) / self.scale
        if self.state is not TrialState.MEASURED or measured is None:
            return None
        if measured.warmup_steps is not None:
            fewer = measured.warmup_steps + len(measured.step_times_s)
            steps = min(steps - warmup + measured.warmup_steps, fewer)
        return self.duration_s - steps * (measured.scaled_from or measured.step_time_s)


def step_value(record: Mapping[str, object] | None) -> float | None:
    """Return the step time of a prediction in the format of job records, in seconds; None if it is unknown."""
    step: Any = (record or {}).get("step_time_s")
    known = isinstance(step, Mapping) and math.isfinite(step["value"])
    return float(step["value"]) if known else None


SEARCH_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "began_s": float,
    "chosen_because": str,
    "believed": dict,
    "search_ended": str,
    "time_limit": lambda data: TimeLimit(**data),
    "shortened": lambda data: Shortened(**data),
    "group": int,
}
"""The fields that the search sets when a trial begins, and functions that read them from plain data. `result.json` has
them next to the prediction."""


STEADY_STEPS, AGREEMENT = 3, 0.02
MIN_STEPS = 2
"""The minimum number of steps of a measured trial: one of warm-up, and one that counts."""


def warmup_steps(step_times_s: Sequence[float], at_most: int) -> int:
    """Return the number of warm-up steps of a trial: `at_most`, or fewer if its steps are steady before.

    Steps are steady if three in a row, not the first one among them, differ by at most 2%, and do not become faster or
    slower throughout. These steps are part of the warm-up, so the test does not select the measured steps.
    """
    for end in range(1 + STEADY_STEPS, min(at_most, len(step_times_s) + 1)):
        before, middle, last = step_times_s[end - STEADY_STEPS : end]
        is_trend = before < middle < last or before > middle > last
        if not is_trend and max(before, middle, last) <= (1.0 + AGREEMENT) * min(before, middle, last):
            return end
    return at_most


def warmup_of_fewer(steps: int, at_most: int) -> int:
    """Return the number of warm-up steps of a trial that ended after `steps` steps: `at_most` if further steps count,
    else half of the steps, at least one."""
    return at_most if steps > at_most else max(1, steps // 2)


def steps_in_time(step_times_s: Sequence[float], planned: int, seconds: float, next_s: float | None = None) -> int:
    """Return how many of the `planned` steps, those in `step_times_s` among them, are finished after more `seconds`.

    Each further step is expected to take `next_s`; None: the median of the finished steps without the first one.
    """
    if not step_times_s:
        return planned
    expected = median(step_times_s[1:] or step_times_s) if next_s is None else next_s
    left = planned - len(step_times_s)
    return planned if left * expected <= seconds else len(step_times_s) + max(0, int(seconds / expected))


RUN_STARTED, TRIAL_STARTED, TRIAL_FINISHED, RUN_FINISHED = KINDS = (
    *("run_started", "trial_started"),
    *("trial_finished", "run_finished"),
)
"""The kinds of events. A run that is resumed starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run. All fields are plain data, without known secrets.

    `kind` is one of KINDS, `time` in seconds since the epoch. `run` is the unique name of the run, `folder` its
    absolute path. `job` has `engine`, `kind` (train or serve), `model`, `chip`, `devices`, `objective`, `fidelity`.
    `trial` is the trial of the event and `best` the best trial so far, in the format of `result.json`; None if there is
    none. `result` is the content of `result.json`, for `run_finished` only; None if there is no result.
    """

    kind: str
    time: float
    run: str
    folder: str
    job: Mapping[str, Any]
    trial: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as data for JSON."""
        return asdict(self)
