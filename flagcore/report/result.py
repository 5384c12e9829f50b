"""The result of a run as typed records: made of a plan, written as result.json, and read for texts and pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from flagcore.domain.objective import SERVING, is_rate, objective_value, pareto
from flagcore.domain.plan import Counts, Plan, PredictionError, Speedup, measured_to_predicted
from flagcore.domain.serving import PER_DEVICE, PER_USER, nest_statistics
from flagcore.domain.trial import RUN, Measurement, Role, Trial, TrialState
from flagcore.i18n import Message, _, from_record
from flagcore.report.formats import lookup
from flagcore.report.text import notes as notes_of

SCHEMA_VERSION = 1
GIB = 2**30
OMITTED: Any = {"omitted": True}
"""The metadata of a field that JSON has only if its value is not None."""

R = TypeVar("R", bound="JsonRecord")


class JsonRecord:
    """A frozen dataclass with the fields of a JSON object, in its order. `PARSERS` read the fields that are records."""

    __slots__ = ()
    PARSERS: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    @classmethod
    def from_json(cls: type[R], data: Mapping[str, Any]) -> R:
        """Return the record of a JSON object. Raises TypeError, LookupError, AttributeError for another object."""
        values = {each.name: data[each.name] for each in fields(cls) if each.name in data}  # type: ignore[arg-type]
        parsers = cls.PARSERS
        return cls(**{n: parsers[n](v) if n in parsers and v is not None else v for n, v in values.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data."""
        values = ((each, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        return {e.name: _plain(value) for e, value in values if value is not None or not e.metadata.get("omitted")}


def _plain(value: Any) -> Any:
    if isinstance(value, (JsonRecord, Predicted)):
        return value.to_json()
    if isinstance(value, (Counts, Speedup, PredictionError)):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _same(source: object, *names: str) -> dict[str, Any]:
    """Return the fields of a record of the domain that have the same name in JSON."""
    return {name: getattr(source, name) for name in names}


def number(value: Any) -> float | None:
    """Return a number as float, None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A predicted figure with its 80% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction in the format of job records, with what the search noted about its trial.

    Figures of servers and costs have names of their own, for `figure`.
    """

    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as plain data."""
        return dict(self.data)

    def figure(self, name: str) -> float | None:
        """Return the number at a dotted key; None if it is unknown."""
        return number(lookup(self.data, name))

    def interval(self, name: str) -> Interval | None:
        """Return a figure with its interval; None if it is unknown."""
        value, low, high = (self.figure(f"{name}.{bound}") for bound in ("value", "low", "high"))
        return None if value is None or low is None or high is None else Interval(value, low, high)

    @property
    def step_s(self) -> float | None:
        """The seconds of a step, for servers the objective in seconds; None if unknown."""
        return self.figure("step_time_s.value")

    @property
    def time(self) -> Mapping[str, float]:
        """The seconds of each part of a step or request; empty if unknown."""
        return self.data.get("time") or {}

    @property
    def limit(self) -> str | None:
        """The bottleneck."""
        return self.data.get("limit")

    @property
    def memory(self) -> Mapping[str, Any]:
        """The memory of a device in GiB by level; empty if unknown."""
        return self.data.get("memory") or {}

    @property
    def chosen_because(self) -> str | None:
        """Why the strategy chose the trial."""
        return self.data.get("chosen_because")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime(JsonRecord):
    """The measured seconds of a step, for a server of the load. Those of probes and shortened trials have an interval.

    `scaled_from` is the time of a shortened step, `modelled` the part that was not measured.
    """

    median: float
    spread: float = 0.0
    n: int = 0
    steps: Sequence[float] = ()
    scaled_from: float | None = field(default=None, metadata=OMITTED)
    modelled: float | None = field(default=None, metadata=OMITTED)
    low: float | None = field(default=None, metadata=OMITTED)
    high: float | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(JsonRecord):
    """A measurement (`flagcore.domain.trial.Measurement`) in GiB, with nested statistics of latencies."""

    PARSERS: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"step_time_s": StepTime.from_json}

    step_time_s: StepTime
    tokens_per_second_per_device: float
    losses: Sequence[float | None] = ()
    effective: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    telemetry: Mapping[str, float] = field(default_factory=dict)
    devices: Sequence[Mapping[str, float]] = ()
    slow_devices: Sequence[str] = ()
    peak_allocated_gib: float | None = field(default=None, metadata=OMITTED)
    peak_reserved_gib: float | None = field(default=None, metadata=OMITTED)
    device_used_gib: float | None = field(default=None, metadata=OMITTED)
    figures: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    points: Sequence[Mapping[str, Any]] | None = field(default=None, metadata=OMITTED)
    broken: Sequence[str] | None = field(default=None, metadata=OMITTED)
    few_steps: bool | None = field(default=None, metadata=OMITTED)
    partial: bool | None = field(default=None, metadata=OMITTED)

    @classmethod
    def of(cls, measured: Measurement) -> Measured:
        """Return the record of a measurement."""
        has_interval = measured.low_s is not None
        sizes = ("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes")
        served: dict[str, Any] = {}
        if measured.figures:
            points = tuple(nest_statistics(point) for point in measured.points)
            served = {"figures": nest_statistics(measured.figures), "points": points, "broken": measured.broken}
        return cls(
            step_time_s=StepTime(
                median=measured.step_time_s,
                spread=measured.spread_s,
                n=len(measured.step_times_s),
                steps=measured.step_times_s,
                scaled_from=measured.scaled_from,
                modelled=measured.modelled_s,
                low=measured.low_s,
                high=measured.high_s if has_interval else None,
            ),
            **_same(
                measured, "tokens_per_second_per_device", "losses", "effective", "versions", "telemetry", "devices"
            ),
            slow_devices=measured.slow,
            **{
                name.replace("_bytes", "_gib"): size / GIB
                for name in sizes
                if (size := getattr(measured, name)) is not None
            },
            **served,
            few_steps=measured.few_steps or None,
            partial=measured.partial or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult(JsonRecord):
    """A trial (`flagcore.domain.trial.Trial`). The best and the baseline have their `cost`.

    `measured_over` are the ratios of the measured to the predicted step time, as `predicted` before all trials and as
    `believed`.
    """

    PARSERS: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"predicted": Predicted, "measured": Measured.from_json}

    number: int
    role: str = Role.SEARCH.value
    candidate: Mapping[str, Any]
    state: str = TrialState.MEASURED.value
    reason: str | None = None
    fidelity: str = RUN
    inconclusive: bool = False
    warm: bool = False
    time_limit: Mapping[str, Any] | None = None
    shortened: Mapping[str, Any] | None = None
    group: int | None = None
    predicted: Predicted = Predicted()
    measured: Measured | None = None
    measured_over: Mapping[str, float | None] = field(default_factory=dict)
    duration_s: float = 0.0
    log: str = ""
    source: str | None = None
    finished_steps_s: Sequence[float] | None = field(default=None, metadata=OMITTED)
    telemetry: Mapping[str, float] | None = field(default=None, metadata=OMITTED)
    cost: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)

    @classmethod
    def of(cls, trial: Trial) -> TrialResult:
        """Return the record of a trial."""
        search_fields = trial.search_fields
        run_fields: dict[str, Any] = {
            name: search_fields.pop(name, None) for name in ("time_limit", "shortened", "group")
        }
        return cls(
            **_same(trial, "number", "reason", "fidelity", "inconclusive", "warm", "duration_s", "log", "source"),
            role=trial.role.value,
            candidate=trial.candidate.as_dict(),
            state=trial.state.value,
            **run_fields,
            predicted=Predicted({**trial.predicted, **search_fields}),
            measured=Measured.of(trial.measurement) if trial.measurement else None,
            measured_over={
                "predicted": measured_to_predicted(trial, "predicted"),
                "believed": measured_to_predicted(trial, "believed"),
            },
            finished_steps_s=trial.finished_steps_s or None,
            telemetry=trial.telemetry or None,
        )

    @property
    def measured_s(self) -> float | None:
        """The measured seconds of a step; None without a measurement."""
        return number(self.measured.step_time_s.median) if self.measured else None

    @property
    def seconds(self) -> float | None:
        """The measured step time; for an estimate, the predicted step time."""
        return self.predicted.step_s if self.state == TrialState.PREDICTED.value else self.measured_s

    @property
    def points(self) -> list[Mapping[str, Any]]:
        """The load points of a trial of servers."""
        return [each for each in (self.measured and self.measured.points) or () if isinstance(each, Mapping)]

    @property
    def broken(self) -> Sequence[str]:
        """The limits that the trial exceeded."""
        return (self.measured and self.measured.broken) or ()

    def figure(self, name: str) -> float | None:
        """Return a measured figure of servers by its dotted name; None if it is unknown."""
        return number(lookup((self.measured and self.measured.figures) or {}, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(JsonRecord):
    """The objective: its name, and whether the maximum or the minimum is the best."""

    name: str
    direction: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(JsonRecord):
    """The noise of a run (`flagcore.domain.plan.Plan`). `not_told_apart` are the numbers of the rivals of the best."""

    drift: float | None = None
    drifted: bool = False
    cold_start: float | None = None
    cold_start_differs: bool = False
    not_told_apart: Sequence[int] = ()
    medians: Sequence[Mapping[str, Any]] = ()

    @property
    def warnings(self) -> list[str]:
        """Warnings that the machine became faster or slower, and that cold trials differ from warm ones."""
        texts = []
        if self.drifted and self.drift is not None:
            text = _(
                "machine drift: the speed of the baseline changed by {drift:+.1%} between its first and last run; "
                "results of trials that are far apart in time may differ by as much",
                drift=self.drift,
            )
            texts.append(text)
        if self.cold_start_differs:
            text = _(
                "the speed of a candidate changed by {change:+.1%} when it started cold, more than noise: set "
                "auto_tuner.control.warm_start: false, and tune again with --new",
                change=self.cold_start,
            )
            texts.append(text)
        return texts


def _trials(records: Sequence[Mapping[str, Any]]) -> list[TrialResult]:
    return [TrialResult.from_json(each) for each in records]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(JsonRecord):
    """The content of result.json.

    `front` are the Pareto-optimal load points of servers. `precision` is the precision that `auto` chose, and why.
    `engines` are the results of several engines, or their errors; the other fields are then those of the best `engine`.
    """

    PARSERS: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "objective": Objective.from_json,
        "counts": lambda data: Counts(**data),
        "baseline": TrialResult.from_json,
        "best": TrialResult.from_json,
        "speedup": lambda data: Speedup(**data),
        "noise": Noise.from_json,
        "predictions_off": lambda data: PredictionError(**data),
        "trials": _trials,
        "repeats": _trials,
        "probes": _trials,
        "engines": lambda data: {
            name: each["error"] if "error" in each else RunResult.from_json(each) for name, each in data.items()
        },
    }

    schema_version: int = SCHEMA_VERSION
    run_dir: str = ""
    chip: str
    devices: int
    objective: Objective
    fidelity: str
    stopped_because: str | None = None
    stopped_message: Any = field(default=None, metadata=OMITTED)
    counts: Counts
    baseline: TrialResult | None = None
    best: TrialResult | None = None
    limits: Mapping[str, float] | None = field(default=None, metadata=OMITTED)
    fastest: int | None = None
    gain: float | None = None
    gains: Sequence[float] = ()
    speedup: Speedup | None = None
    noise: Noise = Noise()
    side_by_side: Mapping[str, Any] | None = None
    predictions_off: PredictionError | None = None
    trials: Sequence[TrialResult] = ()
    repeats: Sequence[TrialResult] = ()
    probes: Sequence[TrialResult] = ()
    slow_devices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    front: Sequence[Mapping[str, Any]] | None = field(default=None, metadata=OMITTED)
    precision: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    engine: str | None = field(default=None, metadata=OMITTED)
    engines: Mapping[str, RunResult | str] | None = field(default=None, metadata=OMITTED)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunResult:
        """Return the result of a result.json. That of an earlier version has gains only, and no speedup."""
        found: RunResult = super(RunResult, cls).from_json(data)
        if "speedup" in data:
            return found
        is_rival = found.baseline is not None and found.baseline.number in found.noise.not_told_apart
        return replace(found, speedup=Speedup.of(found.gains, is_significant=not is_rival))

    @classmethod
    def of(cls, plan: Plan, run_dir: str) -> RunResult:
        """Return the result of a plan, in seconds, GiB, and tokens per second and device."""
        because = plan.stopped_because
        return cls(
            run_dir=run_dir,
            **_same(plan, "chip", "devices", "fidelity", "counts", "gain", "gains", "speedup"),
            objective=Objective(name=plan.objective, direction="max" if is_rate(plan.objective) else "min"),
            stopped_because=because,
            stopped_message=because.record if isinstance(because, Message) else None,
            baseline=TrialResult.of(plan.baseline) if plan.baseline else None,
            best=TrialResult.of(plan.best) if plan.best else None,
            limits=plan.limits or None,
            fastest=plan.fastest.number if plan.fastest else None,
            noise=Noise(
                **_same(plan, "drift", "drifted", "cold_start", "cold_start_differs"),
                not_told_apart=[each.number for each in plan.rivals],
                medians=list(_medians(plan)),
            ),
            side_by_side=_side_by_side(plan),
            predictions_off=plan.prediction_error,
            trials=[TrialResult.of(each) for each in plan.trials],
            repeats=[TrialResult.of(each) for each in plan.repeats],
            probes=[TrialResult.of(each) for each in plan.probes],
            slow_devices=_slow_devices(plan),
            notes=notes_of(plan),
            front=[nest_statistics(point) for point in _front(plan)] if plan.objective in SERVING else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data, without `fastest` if there are no limits."""
        data = JsonRecord.to_json(self)
        return {name: value for name, value in data.items() if name != "fastest" or self.limits is not None}

    @property
    def all_trials(self) -> list[TrialResult]:
        """Probes, trials and repeats in their order."""
        return sorted([*self.probes, *self.trials, *self.repeats], key=lambda trial: int(trial.number))

    @property
    def stop_reason(self) -> str:
        """Why the run stopped, in the selected language; empty while it is in progress."""
        return from_record(self.stopped_because or "", self.stopped_message)

    @property
    def was_interrupted(self) -> bool:
        """Whether the run is in progress, was interrupted or was killed."""
        return self.stopped_because in (None, "", TrialState.INTERRUPTED.value)

    @property
    def is_unmeasured(self) -> bool:
        """Whether no measurement could be the best, or exceeds the latency limits."""
        return self.best is None and self.fastest is None

    @property
    def lost_repeats(self) -> dict[int, str]:
        """The states of the repeats without a measurement, by number."""
        return {each.number: each.state for each in self.repeats if each.state != TrialState.MEASURED.value}


def result(plan: Plan, run_dir: str) -> dict[str, Any]:
    """Return a plan in the format of result.json."""
    return RunResult.of(plan, run_dir).to_json()


def trial(each: Trial) -> dict[str, Any]:
    """Return a trial in the format of result.json."""
    return TrialResult.of(each).to_json()


def _side_by_side(plan: Plan) -> dict[str, Any] | None:
    """Return whether trials ran side by side, and the slowdown as a share of the time alone; None if unknown."""
    if (found := plan.interference) is None:
        return None
    return {**asdict(found), "quiet": found.is_negligible, "text": found.text, "message": found.text.record}


def _front(plan: Plan) -> list[Mapping[str, Any]]:
    """Return the Pareto-optimal load points of output tokens per second of a device and of a user, fastest first.

    A user's rate is the inverse of the median time per token.
    """
    points = [
        {"trial": trial.number, **point, PER_USER: 1.0 / point["tpot_s.p50"]}
        for trial in plan.trials
        if trial.measurement
        for point in trial.measurement.points
        if point.get(PER_DEVICE) and point.get("tpot_s.p50")
    ]
    by_device, by_user = (np.array([point[name] for point in points]) for name in (PER_DEVICE, PER_USER))
    return [points[index] for index in pareto(by_device, by_user)]


def _slow_devices(plan: Plan) -> dict[str, list[int]]:
    """Return the warnings about slow devices, without their figures, each with the numbers of its trials."""
    found: dict[str, list[int]] = {}
    for each in (*plan.trials, *plan.repeats):
        for line in each.measurement.slow if each.measurement else ():
            found.setdefault(re.split(" (?:takes|runs) ", line)[0], []).append(each.number)
    return found


def _medians(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the median of the objective of each repeated candidate, with the number of its first trial."""
    by_number = {each.number: each.measurement for each in (*plan.trials, *plan.repeats)}
    for first, step in plan.medians.items():
        yield {"trial": first, plan.objective: objective_value(plan.objective, step, by_number[first])}
