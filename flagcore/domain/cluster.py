"""The machines of a job: node groups and network levels."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from flagcore.domain.chip import Chip, NotNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a topology, which connects groups of `devices` consecutive devices.

    `bytes_per_second` is the rate of each device in one direction while all devices send. `latency_seconds` is the time
    before the first byte of a message, `hop_seconds` the time of each further step of a pipelined ring (None: a
    sixteenth of the latency). `efficiency` is the share of the rate that large messages reach. `pair_share` is the
    share of a device's rate that one pair of devices can use: 1 behind a switch, 1/(n-1) in a full mesh of n. With n
    devices on the level, the rate is multiplied by (2/n) to the power of `crowding`. A level that `reduces` sums the
    data of its devices, so that only sums leave it. `compute_share` is the share of the device's compute that a running
    collective takes from concurrent kernels.
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
        """Seconds of each further step of a ring."""
        return self.latency_seconds / 16 if self.hop_seconds is None else self.hop_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The levels of a node group, smallest first. The last one connects all devices."""

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Identical nodes with identical chips.

    `memory_bytes` is the memory budget of one device, from the spec or the driver. `name` is that of the spec, and
    `speed` the speed of the kernels relative to the chip. `cpus_per_node` are the CPUs for engines, None if unknown.
    """

    chip: Chip
    nodes: int
    devices_per_node: int
    memory_bytes: int | None = None
    name: str = ""
    speed: float = 1.0
    cpus_per_node: int | None = None

    @property
    def title(self) -> str:
        """The name of the group or, without one, of its chip."""
        return self.name or self.chip.name

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
    def names(self) -> tuple[str, ...]:
        """The names of the node groups, by default those of their chips, with a number if several have the same."""
        titles = [group.title for group in self.groups]
        return tuple(
            f"{title}#{titles[: place + 1].count(title)}" if titles.count(title) > 1 else title
            for place, title in enumerate(titles)
        )

    @property
    def chips(self) -> str:
        """The name of the chip. With several node groups, the number of devices and the chip of each."""
        if len(self.groups) == 1:
            return self.groups[0].title
        return " + ".join(f"{group.devices} x {group.title}" for group in self.groups)

    def peak_flops(self, precision: str) -> float | None:
        """Return the mean peak of the devices in flops per second, None if the peak of a group is unknown."""
        facts = [group.chip.dense_flops_per_second.get(precision) for group in self.groups]
        shares = [group.devices / self.devices for group in self.groups]
        peaks = [share * fact.value for share, fact in zip(shares, facts, strict=True) if fact is not None]
        return sum(peaks) if len(peaks) == len(facts) else None
