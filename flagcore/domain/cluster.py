"""The machines that a job runs on: node groups, and how traffic between devices travels."""

from __future__ import annotations

from dataclasses import dataclass

from flagcore.domain.chip import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a topology, from the inside out.

    A group of `devices` consecutive devices talks over it; each sends `bytes_per_second` in one direction,
    and a message costs `latency_seconds` before its first byte.
    """

    name: str
    devices: int
    bytes_per_second: float
    latency_seconds: float


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
    hosts: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices in the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A list of node groups, usually one."""

    groups: tuple[NodeGroup, ...]

    @property
    def devices(self) -> int:
        """Number of devices in all groups."""
        return sum(group.devices for group in self.groups)
