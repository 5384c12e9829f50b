"""The machines of a job: node groups and network levels."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

from flagcore.domain.chip import Chip, Device, NotNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a topology. It connects each group of `devices` consecutive devices.

    `bytes_per_second`: the rate of each device in one direction while all devices send.
    `latency_seconds`: the time before the first byte of a message.
    `hop_seconds`: the time of each step of a pipelined ring after the first. None means a sixteenth of the latency.
    `efficiency`: the share of the rate that large messages reach.
    `pair_share`: the share of a device's rate that one pair of devices can use: 1 behind a switch, 1/(n-1) in a full
    mesh of n devices.
    `crowding`: with n devices on the level, the rate is multiplied by (2/n) to the power of `crowding`.
    `reduces`: whether the level sums the data of its devices, so that only sums leave it.
    `compute_share`: the share of a device's compute that a running collective takes from concurrent kernels.
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
        """The time in seconds of each ring step after the first: `hop_seconds`, or its default."""
        return self.latency_seconds / 16 if self.hop_seconds is None else self.hop_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The levels of a node group's network, from the innermost to the one that connects all devices."""

    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Identical nodes with identical chips.

    `memory_bytes`: the memory budget of one device, from the spec or the driver.
    `name`: the name of the group in the spec. Empty if there is none.
    `speed`: the speed of kernels relative to the chip.
    `cpus_per_node`: the number of CPUs per node that engines may use. None if it is unknown.
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
        """The name of the group, or the name of its chip if the group has no name."""
        return self.name or self.chip.name

    @property
    def devices(self) -> int:
        """Number of devices in the group."""
        return self.nodes * self.devices_per_node

    @property
    def link_domain(self) -> int:
        """The devices that the link connects: those of a node if it has fewer than a link inside the usual nodes."""
        size = (self.chip.link and self.chip.link.domain_size) or self.devices_per_node
        return min(size, self.devices_per_node) if size <= self.chip.devices_per_node else size

    def usable(self, devices: Iterable[Device], count: int) -> tuple[Device, ...]:
        """Return those of `devices` that trials on `count` devices of a node can use.

        If the link has `whole_domains`, devices of complete domains come first on each host. If a trial takes exactly
        one domain, the other devices are left out.
        """
        own, link = [each for each in devices if self.chip.has_name(each.chip)], self.chip.link
        if link is None or link.domain_size is None or not link.whole_domains:
            return tuple(own)
        domains, size = defaultdict[tuple[str, int], list[Device]](list), link.domain_size
        for each in own:
            domains[each.host, each.index // size].append(each)
        whole = [each for domain in domains.values() if len(domain) == size for each in domain]
        return (*whole, *(each for each in own if count != size and each not in whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All node groups of a job, usually one. Ranks are assigned to the groups in order."""

    groups: tuple[NodeGroup, ...]

    @property
    def devices(self) -> int:
        """Number of devices in all groups."""
        return sum(group.devices for group in self.groups)

    @property
    def names(self) -> tuple[str, ...]:
        """The titles of the node groups. Groups with the same title are numbered, such as `name#2`."""
        titles = [group.title for group in self.groups]
        return tuple(
            f"{title}#{titles[: place + 1].count(title)}" if titles.count(title) > 1 else title
            for place, title in enumerate(titles)
        )

    @property
    def chips(self) -> str:
        """The title of the only node group, or the number of devices and the title of each of several groups."""
        if len(self.groups) == 1:
            return self.groups[0].title
        return " + ".join(f"{group.devices} x {group.title}" for group in self.groups)

    @property
    def linked_devices(self) -> int:
        """The largest number of devices that share a host, or a link that connects several hosts."""
        return max(max(group.link_domain, group.devices_per_node) for group in self.groups)

    def peak_flops(self, precision: str) -> float | None:
        """Return the mean peak rate per device in flops per second, or None if the peak rate of a group is unknown."""
        facts = [group.chip.dense_flops_per_second.get(precision) for group in self.groups]
        shares = [group.devices / self.devices for group in self.groups]
        peaks = [share * fact.value for share, fact in zip(shares, facts, strict=True) if fact is not None]
        return sum(peaks) if len(peaks) == len(facts) else None
