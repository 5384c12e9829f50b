"""What running a candidate gave: a measurement, or a failure with its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from flagcore.domain.candidate import Candidate

ESTIMATE, PROBE, RUN = FIDELITIES = ("estimate", "probe", "run")
"""How real the figures of a candidate are, from the cheapest on: predicted, with compute, optimizer and memory measured
on one device, or of the whole job on all its devices."""


class TrialState(Enum):
    """How a trial ended. Only MEASURED competes for the best, if no limit was broken; the last five count as failed.

    PREDICTED is a candidate of which no trial was wanted.
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
    """Why a trial ran: the user's own configuration, a candidate of the search, or a repeat of one at the end.

    INTERFERENCE runs a measured candidate again, beside others. IMPORTED ran elsewhere, for another tool. Neither
    counts as a result of its candidate.
    """

    BASELINE = "baseline"
    INTERFERENCE = "interference"
    SEARCH = "search"
    REPEAT = "repeat"
    IMPORTED = "imported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured in one run. Seconds and bytes; figures that the run did not give are None.

    `step_times_s` are the steps that count (warm-up dropped), in order. `spread_s` is their interquartile
    range. `effective` are the values that the engine reported, and `partial` marks a trial that was
    ended early. Where an engine serves, a step is the seconds of the objective in one run of the load, `figures` are
    those of the load point that is shown, `points` are all load points, and `broken` describes which limits were
    not kept. `devices` are figures of single ones, each with its number `device` over all nodes: what the management
    tool showed, and the speed test of a rank; `slow` names those that stand out. Of a probe and of a shortened trial,
    `modelled_s` of the step are modelled, and `low_s` to `high_s` is an 80% interval of the step. `scaled_from` are the
    measured seconds of a shortened step; all other times are scaled to a whole one. None: the steps were whole.
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
    devices: tuple[Mapping[str, float], ...] = ()
    slow: tuple[str, ...] = ()
    scaled_from: float | None = None

    @property
    def interval(self) -> float:
        """Half of the interval of a scaled step as a share of it, 0 for one that ran whole."""
        if self.scaled_from is None or self.low_s is None or self.high_s is None:
            return 0.0
        return (self.high_s - self.low_s) / 2.0 / self.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """How long a trial may take, and why, in words."""

    seconds: float
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """Steps with `global_batch_size` samples instead of `whole`: with fewer micro-batches, or on `nodes` of `of_nodes`.

    The time of a step times `scale` is that of a whole one, both as predicted; `low` to `high` is an 80% interval. On
    fewer nodes a device has `more_bytes` in use, and `own` is half of the interval as a share without what all
    candidates have in common.
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
        """Return a measurement of shortened steps as one of whole steps."""
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
    """One run of one candidate, as the store keeps it.

    `predicted` was made before any run. `fidelity` is one of FIDELITIES. `log` is what it printed, relative to the
    run's folder. `source` is the file of another tool that it was imported from; None for one that flagcore ran.
    `began_s` are the seconds of the run before it. If a strategy chose it, `chosen_because` is the reason and
    `believed` is what it expected by then, in the format of predictions. A repeat has `search_ended`: why no further
    candidate was tried. `time_limit` and `shortened` are how it was run. Of an `inconclusive` trial others used the
    devices: it proves nothing about any candidate, and its own may be tried again. A `warm` one was forked from a
    process that had imported its modules; others started as a new program. `group` is the number of its group of
    devices if others ran beside it, None if it ran alone.
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
    warm: bool = False

    @property
    def notes(self) -> dict[str, object]:
        """The fields of NOTES that are set, by name, as plain data."""
        found = {name: value for name in NOTES if (value := getattr(self, name)) is not None}
        return {name: asdict(value) if isinstance(value, _HOW) else value for name, value in found.items()}

    @property
    def settles(self) -> bool:
        """Whether its candidate needs no further trial."""
        return self.state is not TrialState.INTERRUPTED and not self.inconclusive

    @property
    def is_final(self) -> bool:
        """Whether it was measured alone, and as the job will run: with whole steps, or scaled only from fewer nodes."""
        if self.measurement is None or self.group is not None:
            return False
        return self.measurement.scaled_from is None or bool(self.shortened and self.shortened.nodes)

    @property
    def interval(self) -> float:
        """Half of the interval of a scaled step as a share of it, as far as it is not that of all candidates."""
        if self.shortened and self.shortened.nodes:
            return self.shortened.own
        return self.measurement.interval if self.measurement else 0.0

    def overhead_s(self, steps: int) -> float | None:
        """Return the seconds of a measured trial without its `steps` steps, mostly its start; None for other trials."""
        measured = self.measurement
        if self.state is not TrialState.MEASURED or measured is None:
            return None
        return self.duration_s - steps * (measured.scaled_from or measured.step_time_s)


_HOW = (TimeLimit, Shortened)

NOTES: Mapping[str, Callable[[Any], Any]] = {
    "began_s": float,
    "chosen_because": str,
    "believed": dict,
    "search_ended": str,
    "time_limit": lambda data: TimeLimit(**data),
    "shortened": lambda data: Shortened(**data),
    "group": int,
}
"""Fields that the search sets when a trial begins, and how they are read. `result.json` has them next to the
prediction."""
