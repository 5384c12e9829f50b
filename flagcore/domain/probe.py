"""Probes: one device runs single ranks of a larger job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagcore.domain.candidate import Candidate
from flagcore.domain.prediction import RankPrediction
from flagcore.domain.trial import TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """Figures of one rank: bytes, and medians and interquartile ranges of seconds over the timed steps.

    `compute_time_s` is forward and backward of a whole step without communication. If `microbatches_run` is less than
    `microbatches`, it is scaled up. `static_bytes` stay allocated between steps. `reserved_bytes` is None without a
    caching allocator. `device_used_bytes` is without the buffers of collectives, since none ran.
    """

    stage: int
    static_bytes: int
    peak_forward_backward_bytes: int
    peak_optimizer_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int | None
    device_used_bytes: int
    compute_time_s: float
    compute_spread_s: float
    optimizer_time_s: float
    optimizer_spread_s: float
    steps: int
    microbatches: int
    microbatches_run: int
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProbe:
    """The probe of one global rank: the measurement, or the reason without one. Running out of memory is a result.

    `device` is the index of the device that ran it among the free ones.
    """

    rank: int
    state: TrialState
    predicted: RankPrediction
    measured: RankMeasurement | None = None
    reason: str | None = None
    duration_s: float = 0.0
    device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The ranks of one candidate that were probed."""

    candidate: Candidate
    ranks: tuple[RankProbe, ...]

    @property
    def measured(self) -> tuple[RankMeasurement, ...]:
        """The measurements of the ranks that have one."""
        return tuple(rank.measured for rank in self.ranks if rank.measured is not None)

    @property
    def out_of_memory(self) -> bool:
        """Whether a rank ran out of memory."""
        return any(rank.state is TrialState.OUT_OF_MEMORY for rank in self.ranks)

    @property
    def duration_s(self) -> float:
        """Seconds of all ranks on devices in parallel: those of the busiest device."""
        busy: dict[int, float] = {}
        for rank in self.ranks:
            busy[rank.device] = busy.get(rank.device, 0.0) + rank.duration_s
        return max(busy.values(), default=0.0)
