"""Protocols of plugins and launchers, and the platform of a task that plugins describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from flagcore.contracts.chip import CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Exit, FailurePattern, Launch
from flagcore.domain.spec import KIND, SLOTS, Task
from flagcore.domain.trial import TimeLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost models of the first node group, from plugins or else from the core.

    `guessed` is whether the kernel times are those of the core's roofline, neither measured nor fitted. With
    `synchronous`, the host computes, as on a CPU, so that kernels do not hide the time of launches. `run_slowdown` is
    the slowdown of kernels in a run on many devices relative to `kernels`.

    `further` are the costs of the other node groups by the rank of their first device, in the order of ranks. `between`
    has the times of messages between groups; None if there is one group.
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
        """The costs of each node group."""
        return (self, *self.further.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """How trials start on the hosts of one of several node groups.

    `kind` is the type of the hosts in host files, `devices` the number of a host. `environment` are the variables of
    the chip's plugin, `envs` those of the group, `prepare_launch` the changes of plugins for this chip.
    """

    kind: str
    nodes: int
    devices: int
    support: EngineSupport
    environment: Mapping[str, str]
    envs: Mapping[str, str]
    prepare_launch: Callable[[Launch], Launch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The task, and what plugins provide for it.

    `knobs` are all knobs of plugins for the chip, also those that the spec does not name. `conflicts` describes
    environment variables for which the user and plugins set different values. `read_devices` are the devices of
    `telemetry`. `cores` are the CPU cores for trials; empty: all. `setups` are those of several node groups, in order;
    empty if there is one.
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
    setups: tuple[HostSetup, ...] = ()

    @property
    def selected_devices(self) -> tuple[str, ...] | None:
        """The names of the devices that the spec's `envs` select, in order; None if they do not select devices."""
        names = self.task.spec.envs.get(self.support.visible_devices or "")
        return None if names is None else tuple(name.strip() for name in names.split(","))

    @property
    def group_of_hosts(self) -> dict[str, int]:
        """The index of each host's node group; empty if the hosts are not known."""
        groups, hosts = self.task.cluster.groups, self.task.spec.cluster.hosts
        if len(groups) == 1:
            return dict.fromkeys(hosts, 0)
        return dict(zip(hosts, (index for index, group in enumerate(groups) for _ in range(group.nodes)), strict=False))

    def on_hosts(self, hosts: tuple[str, ...]) -> Platform:
        """Return the platform of trials on these hosts."""
        spec = self.task.spec
        task = replace(self.task, spec=replace(spec, cluster=replace(spec.cluster, hosts=hosts)))
        pairs = list(zip(self.read_devices, self.telemetry, strict=True))
        selected = [pair for host in hosts for pair in pairs if pair[0].host == host]
        devices, readers = tuple(device for device, _ in selected), tuple(reader for _, reader in selected)
        return replace(self, task=task, read_devices=devices, telemetry=readers)

    def prepared(self, planned: Launch) -> Launch:
        """Return `planned` with the environment of plugins and of the spec, and with the changes of plugins.

        On hosts of several node groups, each host has those of its own chip, and SLOTS and KIND are replaced. A host
        also has its own variables of the spec.
        """
        spec, own = self.task.spec, self.task.spec.cluster.host_envs
        if not (planned.hosts and (self.setups or own)):
            return self._prepared(planned, {})
        of_hosts = (each for each in self.setups for _ in range(each.nodes))
        setups = dict(zip(spec.cluster.hosts, of_hosts, strict=False))
        on_host: dict[str, Launch] = {}
        for host in planned.hosts:
            of_host = own.get(host, {})
            one = _set_up(planned, setups[host], spec.envs, of_host) if setups else self._prepared(planned, of_host)
            on_host[host] = one
        return replace(on_host[planned.hosts[0]], on_host=on_host)

    def _prepared(self, planned: Launch, of_host: Mapping[str, str]) -> Launch:
        """Return the launch of a host of a single node group."""
        spec = self.task.spec
        environment = {**planned.environment, **self.environment, **spec.envs, **spec.cluster.envs, **of_host}
        return self.prepare_launch(replace(planned, environment=environment))

    def limited(self, planned: Launch, limit: TimeLimit) -> Launch:
        """Return `planned` with the time, memory and disk limits of a trial."""
        return replace(
            planned,
            timeout_seconds=limit.seconds,
            timeout_because=limit.because,
            memory_limit_bytes=self.memory_limit_bytes,
            disk_limit_bytes=self.task.spec.control.disk_limit or planned.disk_limit_bytes,
        )

    @property
    def memory_limit_bytes(self) -> int | None:
        """The memory in bytes that the processes of a node may use if devices share it; None if they do not."""
        group = self.task.cluster.groups[0]
        memory = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
        return memory if self.support.shared_devices else None


def _set_up(planned: Launch, setup: HostSetup, envs: Mapping[str, str], of_host: Mapping[str, str]) -> Launch:
    """Return the launch of one host."""
    environment = {**planned.environment, **setup.environment, **envs, **setup.envs, **of_host}
    own = setup.prepare_launch(replace(planned, environment=environment))
    words = (word.replace(SLOTS, str(setup.devices)).replace(KIND, setup.kind) for word in own.argv)
    return replace(own, argv=tuple(words))


class Plugins(Protocol):
    """The hooks of all plugins as typed methods. The results of plugins that fail are left out."""

    def devices(self) -> tuple[Device, ...]: ...
    def detection_failures(self) -> Mapping[str, str]: ...
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


class RunningLaunch(Protocol):
    """A started launch."""

    def poll(self) -> Exit | None:
        """Return the exit of the launch, or None while it runs."""

    def wait(self, seconds: float) -> Exit | None:
        """Wait at most `seconds` for the exit, and return it or None."""

    def stop(self) -> Exit:
        """End the whole process tree if it runs, and return its exit."""


class Launcher(Protocol):
    """Starts launches on this machine or on other hosts."""

    name: str

    def start(self, launch: Launch) -> RunningLaunch:
        """Start `launch` in its own process group. Raises FlagError if it cannot be started."""


@runtime_checkable
class PersistentLauncher(Protocol):
    """Optional: a launcher that keeps processes between launches."""

    def close(self) -> None:
        """End all processes that the launcher keeps."""


@runtime_checkable
class MultiHostLauncher(Protocol):
    """Optional: a launcher that starts trials on other hosts."""

    def has_allocation(self) -> bool:
        """Return whether flagcore runs in an allocation of several hosts. Must return at once."""

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return those of `hosts` that have not failed too often."""

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return the first `count` of `hosts` that have not failed, for the next trial.

        Raises FlagError if too few are left.
        """

    def find_hosts(self, nodes: int) -> tuple[str, ...]:
        """Return the hosts for trials if the spec does not name them; empty if there are none.

        `nodes` is the number of nodes in the spec, by default 1. Raises FlagError if the hosts cannot be listed.
        """

    def resume(self, lost: Iterable[str], cut_off: Iterable[str]) -> None:
        """Continue a run: prefer hosts that were not `lost`, and end remaining processes of the trials with the folders
        `cut_off`.
        """
