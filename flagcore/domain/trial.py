"""What running a candidate gave: a measurement, or a failure with its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

    IMPORTED ran elsewhere, for another tool: it settles no candidate of the run.
    """

    BASELINE = "baseline"
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
    tool showed, and the speed test of a rank; `slow` names those that stand out. Of a probe, `modelled_s` of the step
    are modelled, and `low_s` to `high_s` is an 80% interval of the step.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of one candidate, as the store keeps it.

    `predicted` was made before any run. `fidelity` is one of FIDELITIES. `log` is what it printed, relative to the
    run's folder. `source` is the file of another tool that it was imported from; None for one that flagcore ran.
    `began_s` are the seconds of the run before it. If a strategy chose it, `chosen_because` is the reason and
    `believed` is what it expected by then, in the format of predictions. A repeat has `search_ended`: why no further
    candidate was tried.
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

    @property
    def notes(self) -> dict[str, object]:
        """The fields of NOTES that are set, by name."""
        return {name: value for name in NOTES if (value := getattr(self, name)) is not None}


NOTES: Mapping[str, Callable[[Any], Any]] = {
    "began_s": float,
    "chosen_because": str,
    "believed": dict,
    "search_ended": str,
}
"""Fields that the search sets when a trial begins, and their types. `result.json` has them next to the prediction."""
