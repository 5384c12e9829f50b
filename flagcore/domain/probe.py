"""Probes: single ranks of a candidate that run on one device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagcore.domain.prediction import RankPrediction
from flagcore.domain.space import Candidate
from flagcore.domain.trial import TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """The measurement of one rank. Times are medians over the timed steps, and spreads are interquartile ranges.

    `static_bytes`: the memory that stays allocated between steps.
    `reserved_bytes`: the memory that the caching allocator reserves. None if there is no caching allocator.
    `device_used_bytes`: the memory in use on the device, without the buffers of collectives.
    `compute_time_s`: the time of the forward and backward passes of a whole step, without communication. If
    `microbatches_run` is less than `microbatches`, the measured time is scaled up.
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
    """The probe of one global rank, with its measurement or the reason why it failed.

    `device`: the index of the device that ran it, counted over all hosts.
    `inconclusive`: whether the host was lost, so that the probe shows nothing about the candidate.
    """

    rank: int
    state: TrialState
    predicted: RankPrediction
    measured: RankMeasurement | None = None
    reason: str | None = None
    duration_s: float = 0.0
    device: int = 0
    inconclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The probed ranks of one candidate."""

    candidate: Candidate
    ranks: tuple[RankProbe, ...]

    @property
    def measured(self) -> tuple[RankMeasurement, ...]:
        """The measurements of the ranks whose probe succeeded."""
        return tuple(rank.measured for rank in self.ranks if rank.measured is not None)

    @property
    def out_of_memory(self) -> bool:
        """Whether a probed rank ran out of memory."""
        return any(rank.state is TrialState.OUT_OF_MEMORY for rank in self.ranks)

    @property
    def duration_s(self) -> float:
        """The duration of the probe in seconds: that of the busiest device, because devices run in parallel."""
        by_device: dict[int, float] = {}
        for rank in self.ranks:
            by_device[rank.device] = by_device.get(rank.device, 0.0) + rank.duration_s
        return max(by_device.values(), default=0.0)
