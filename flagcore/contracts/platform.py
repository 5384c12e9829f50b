"""The plugins as the core calls them, their answers about one task, and launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flagcore.contracts.chip import CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Exit, FailurePattern, Launch
from flagcore.domain.spec import Task
from flagcore.domain.trial import TimeLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The inputs of predictions: the plugins' answers, or the core's roofline if they have none.

    `guessed` is whether the chip's kernels were neither measured nor fitted. `synchronous`: the host
    computes itself, as a plain CPU does: its launches take their own time, behind no kernel. `run_slowdown` is by how
    much kernels are longer in a run on many devices than `kernels` predicts.

    They are those of the first node group. `further` are those of the others by the rank of their first device, in the
    order of ranks, and `between` has the time of a message from one group to the next; without others it is None.
    """

    memory: MemoryModel
    kernels: KernelCosts
    collectives: CollectiveCosts
    guessed: bool = False
    synchronous: bool = False
    run_slowdown: float = 1.0
    further: Mapping[int, Costs] = field(default_factory=dict)
    between: CollectiveCosts | None = None

    @property
    def groups(self) -> tuple[Costs, ...]:
        """Return the costs of each node group."""
        return (self, *self.further.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The answers of plugins about one task, collected once in discover.

    `knobs` are all that plugins have for the chip, in the spec or not. `conflicts` are variables that the user sets
    differently from plugins. `read_devices` are the devices of `telemetry`. `cores` are the CPU cores on which its
    trials run, all if empty.
    """

    task: Task
    costs: Costs
    support: EngineSupport
    environment: Mapping[str, str]
    pruning_rules: tuple[PruningRule, ...]
    failure_patterns: tuple[FailurePattern, ...]
    telemetry: tuple[Telemetry, ...]
    prepare_launch: Callable[[Launch], Launch]
    knobs: tuple[Knob, ...] = ()
    engine_version: str | None = None
    conflicts: tuple[str, ...] = ()
    read_devices: tuple[Device, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def selected_devices(self) -> tuple[str, ...] | None:
        """The names of the devices that the spec's `envs` select, in order; None: they do not."""
        names = self.task.spec.envs.get(self.support.visible_devices or "")
        return None if names is None else tuple(name.strip() for name in names.split(","))

    def on_hosts(self, hosts: tuple[str, ...]) -> Platform:
        """Return the platform of a trial on these hosts."""
        spec = self.task.spec
        task = replace(self.task, spec=replace(spec, cluster=replace(spec.cluster, hosts=hosts)))
        pairs = list(zip(self.read_devices, self.telemetry, strict=True))
        mine = [pair for host in hosts for pair in pairs if pair[0].host == host]
        devices, readers = tuple(device for device, _ in mine), tuple(reader for _, reader in mine)
        return replace(self, task=task, read_devices=devices, telemetry=readers)

    def prepared(self, planned: Launch) -> Launch:
        """Return `planned` with the plugins' environment, then the spec's, and the changes of plugins."""
        environment = {**planned.environment, **self.environment, **self.task.spec.envs}
        return self.prepare_launch(replace(planned, environment=environment))

    def limited(self, planned: Launch, limit: TimeLimit) -> Launch:
        """Return `planned` with the limits of a trial: time, memory and disk."""
        return replace(
            planned,
            timeout_seconds=limit.seconds,
            timeout_because=limit.because,
            memory_limit_bytes=self.memory_limit_bytes,
            disk_limit_bytes=self.task.spec.control.disk_limit or planned.disk_limit_bytes,
        )

    @property
    def memory_limit_bytes(self) -> int | None:
        """How much memory the processes of a node may use if its devices share it; None if devices have their own."""
        group = self.task.cluster.groups[0]
        memory = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
        return memory if self.support.shared_devices else None


class Plugins(Protocol):
    """The hooks as typed methods. A plugin that fails costs only its own answer."""

    def devices(self) -> tuple[Device, ...]: ...
    def undetected(self) -> Mapping[str, str]: ...
    def chips(self) -> tuple[Chip, ...]: ...
    def vendor(self, environment: Mapping[str, str]) -> str | None: ...
    def topology(self, group: NodeGroup) -> Topology | None: ...
    def memory_model(self, group: NodeGroup, engine: str) -> MemoryModel | None: ...
    def kernel_costs(self, chip: Chip, engine: str) -> KernelCosts | None: ...
    def collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | None: ...
    def environment(
        self, chip: Chip, engine: str, engine_version: str | None = None, task: Task | None = None
    ) -> Mapping[str, str]: ...
    def engine_support(self, chip: Chip, engine: str, engine_version: str | None = None) -> EngineSupport: ...
    def check_task(self, task: Task, engine_version: str | None = None) -> tuple[TaskAdvice, ...]: ...
    def knobs(self, chip: Chip, engine: str, engine_version: str | None = None) -> tuple[Knob, ...]: ...
    def pruning_rules(self, task: Task) -> tuple[PruningRule, ...]: ...
    def prepare_launch(self, launch: Launch, task: Task) -> Launch: ...
    def failure_patterns(
        self, chip: Chip, engine: str, engine_version: str | None = None
    ) -> tuple[FailurePattern, ...]: ...
    def telemetry(self, device: Device) -> Telemetry | None: ...


class Running(Protocol):
    """A started launch."""

    def poll(self) -> Exit | None:
        """Return how it ended, or None while it runs."""

    def wait(self, seconds: float) -> Exit | None:
        """Wait at most `seconds` and return like `poll`."""

    def stop(self) -> Exit:
        """End the whole tree of processes and return how it ended. Returns at once if it has ended."""


class Launcher(Protocol):
    """Starts launches somewhere."""

    name: str

    def start(self, launch: Launch) -> Running:
        """Start `launch` in its own process group. Raises FlagError if it cannot be started."""


@runtime_checkable
class KeepsProcesses(Protocol):
    """A launcher that keeps processes from one launch to the next. Optional."""

    def close(self) -> None:
        """End them."""


@runtime_checkable
class OnHosts(Protocol):
    """A launcher that starts trials on other hosts. Optional."""

    def at_hand(self) -> bool:
        """Return whether flagcore runs in an allocation of several hosts, which `find_hosts` returns. Takes no time."""

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return `count` of `hosts` for the next trial: the first ones, except that others replace those that failed.

        Raises FlagError if too few are left.
        """

    def find_hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the hosts on which it starts trials, without those being named; none if there are none.

        `nodes` is how many the spec asks for; 1 if it does not say.

        Raises FlagError if they cannot be listed.
        """
