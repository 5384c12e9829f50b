"""The machines of a job: node groups, and the levels of the network between devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from flagcore.domain.chip import Chip, NotNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a topology.

    It connects groups of `devices` consecutive devices; each sends `bytes_per_second` in one direction (on an
    outer level: across it, all at once), and a message takes `latency_seconds` before its first byte.

    `hop_seconds` is the time of each further step of a pipelined ring; None: a sixteenth of the latency.
    `efficiency` is the share of the rate that large messages reach. `pair_share` is the share of a device's rate
    of one pair of devices (1 behind a switch, 1/(n-1) in a full mesh of n). `crowding` describes how the rate falls
    when n devices use the level: as (2/n) to this power. `reduces` means that the level sums what its devices send,
    so that only sums leave it. `compute_share` is the share of the device's compute that a running collective takes
    from concurrent kernels.
    """

    name: str
    devices: int
    bytes_per_second: Positive
    latency_seconds: NotNegative
    hop_seconds: NotNegative | None = None
    efficiency: Positive = 0.75
    pair_share: Annotated[float, Gt(0), Le(1)] = 1.0
    crowding: NotNegative = 0.0
    reduces: bool = False
    compute_share: Annotated[float, Ge(0), Le(1)] = 0.15

    @property
    def hop(self) -> float:
        """Seconds of one further step."""
        return self.latency_seconds / 16 if self.hop_seconds is None else self.hop_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The levels of a node group, smallest first. The last one spans every device."""

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes with equal chips. `memory_bytes` is the budget of one device, from the spec or the driver."""

    chip: Chip
    nodes: int
    devices_per_node: int
    memory_bytes: int | None = None

    @property
    def devices(self) -> int:
        """Number of devices in the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Node groups, usually one. Ranks are assigned to them in order."""

    groups: tuple[NodeGroup, ...]

    @property
    def devices(self) -> int:
        """Number of devices in all groups."""
        return sum(group.devices for group in self.groups)

    @property
    def chips(self) -> str:
        """The name of the chip; of several chips, each with its number of devices."""
        if len(self.groups) == 1:
            return self.groups[0].chip.name
        return " + ".join(f"{group.chip.name} ({group.devices})" for group in self.groups)

    def peak_flops(self, precision: str) -> float | None:
        """Return the peak flops per second of a device, the mean of all; None if one is unknown."""
        known = [group.chip.dense_flops_per_second.get(precision) for group in self.groups]
        shares = [group.devices / self.devices for group in self.groups]
        peaks = [share * peak.value for share, peak in zip(shares, known, strict=True) if peak is not None]
        return sum(peaks) if len(peaks) == len(known) else None
