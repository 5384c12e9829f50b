"""Protocols of plugins and launchers, and the platform of a task that plugins describe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from flagcore.domain.chip import Chip, Device, Support
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport, TaskAdvice, ValueRule, device_variables, without_devices
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Exit, FailurePattern, Launch
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import KIND, SLOTS, Task
from flagcore.domain.trial import TimeLimit

if TYPE_CHECKING:
    from flagcore.contracts.workload import Workload
from flagcore.domain.chip import DeviceUse
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray


class MemoryModel(Protocol):
    """Computes the memory in use of a device from the memory of tensors, in bytes. Called with columns.

    The method `communicator_bytes() -> float` is optional, for a chip whose collectives have buffers of their own for
    each group of ranks: the buffers of one communicator, which `device_used_bytes` does not include.
    """

    def capacity_bytes(self) -> float | None:
        """Return the memory that a trial may use on one device, or None if unknown."""

    def workspace_bytes(self) -> float:
        """Return the size of the matrix library's workspace for one thread."""

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return the memory that the allocator reserves if tensors use `allocated` bytes at their peak."""

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return the memory in use on the device: `reserved`, context, libraries and collective buffers."""


def communicator_bytes(model: MemoryModel) -> float:
    """Return the buffers of one communicator, 0 if `model` does not have the method."""
    buffers = getattr(model, "communicator_bytes", None)
    return float(buffers()) if buffers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The sizes of causal attention on one device for a batch of sequences of equal length. The fields broadcast.

    In training, `queries` equals `keys`. In serving, prefill computes the last `queries` of the `keys`, and decoding
    has one query per sequence, with keys and values in the cache. Sequences of different lengths are separate elements.
    """

    batch: FloatArray
    """Number of sequences."""
    heads: FloatArray
    """Number of query heads on this device."""
    groups: FloatArray
    """Number of key and value heads on this device; equal to `heads` without grouping."""
    queries: FloatArray
    """Number of computed positions, the last of the `keys`."""
    keys: FloatArray
    """Number of positions that are attended to, including cached ones."""
    head_dim: FloatArray
    """Width of a head, the mean if keys and values have different widths."""


class KernelCosts(Protocol):
    """The times of kernels on one device in seconds, without the host's time to launch them.

    All sizes are arrays that broadcast. Unknown times are NaN.
    """

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of C[m,n] = A[m,k] B[k,n] in `precision` (fp32 bf16 fp16 fp8 mxfp8 nvfp4 ...)."""

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the forward pass of fused causal attention."""

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the backward pass of fused causal attention."""

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel that reads and writes `bytes_moved` bytes in total."""

    def launch_seconds(self) -> float:
        """Return the host's time to launch one kernel, including the framework."""

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy between device and pinned host memory in one direction."""

    def run_slowdown(self) -> float:
        """Return the slowdown of kernels in a run on many devices relative to these times.

        It is 1 if the times were measured in such runs. Kernels that were measured alone are slower in runs, because of
        power limits, lower clocks and waiting times.
        """


class CollectiveCosts(Protocol):
    """The times of collectives between devices in seconds."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective in a group of `ranks` devices that are `stride` devices apart.

        `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or send. `payload_bytes` is the size of the
        message, of the reduced, gathered or scattered tensor as a whole, or of a rank's tensor before an all-to-all.
        The time is 0 for one rank, and NaN if unknown.
        """

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share (0 to 1) of a device's compute that a running collective takes from concurrent kernels."""


class Telemetry(Protocol):
    """Reads figures of one device before and during a trial.

    Two methods are optional. `use() -> DeviceUse` reports which processes use the device; it is called before each
    trial, and after a trial that ran out of memory. `describe() -> Mapping[str, str]` returns `uuid`, `bus` (the PCI
    address) and `links` (to other devices) as far as known; `flag devices` calls it.
    """

    def sample(self) -> Mapping[str, float]:
        """Return figures by name, e.g. `memory_used_bytes`, `power_watts`, `temperature_celsius`.

        Raises LookupError if this device does not respond although others do.
        """


def description_of(reader: Telemetry) -> Mapping[str, str]:
    """Return the result of `describe`; empty from telemetry without it."""
    describe = getattr(reader, "describe", None)
    return describe() if describe else {}


def device_use(reader: Telemetry) -> DeviceUse:
    """Return the result of `use`, or an empty DeviceUse from telemetry without it."""
    use = getattr(reader, "use", None)
    return use() if use else DeviceUse()


class PruningRule(Protocol):
    """A rule for candidates that are not worth a trial. Reports show `name` with a count, and `message`."""

    name: str
    message: str

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return True for each candidate to prune. Called with blocks of independent rows."""


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
    the chip's plugin, `envs` those of the group.
    """

    kind: str
    nodes: int
    devices: int
    support: EngineSupport
    environment: Mapping[str, str]
    envs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The task, its engine, and what plugins provide for it.

    `knobs` are all knobs of plugins for the chip, also those that the spec does not name. `conflicts` describes
    environment variables for which the user and plugins set different values. `devices` are the devices of the task's
    chips that were detected for its trials, in order; `telemetry` has those that can be read. `cores` are the CPU cores
    for trials; empty: all. `setups` are those of several node groups, in order; empty if there is one.
    `value_rules` are the values that do not work, and `pruning_rules` what is not worth a trial. `precision_reason`
    tells why the precision was chosen, empty if the spec names it.
    """

    task: Task
    workload: Workload
    costs: Costs
    support: EngineSupport = field(default_factory=lambda: EngineSupport(support=Support.YES))
    environment: Mapping[str, str] = field(default_factory=dict)
    pruning_rules: tuple[PruningRule, ...] = ()
    failure_patterns: tuple[FailurePattern, ...] = ()
    telemetry: Mapping[Device, Telemetry] = field(default_factory=dict)
    value_rules: tuple[ValueRule, ...] = ()
    knobs: tuple[Knob, ...] = ()
    engine_version: str | None = None
    conflicts: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    cores: tuple[int, ...] = ()
    setups: tuple[HostSetup, ...] = ()
    precision_reason: str = ""

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
        devices = tuple(device for host in hosts for device in self.devices if device.host == host)
        return replace(self, task=task, devices=devices)

    def devices_of(self, host: str = "") -> tuple[Device, ...]:
        """Return the devices of a trial on `host`, or on this machine: the first that were detected.

        Where variables of the spec name devices of a host, which detection there does not know, or where too few were
        detected, they are those that the spec names, else numbered from 0.
        """
        spec, group = self.task.spec, self.task.cluster.groups[self.group_of_hosts.get(host, 0)]
        support, variables = self._variables_of(host)
        cards = spec.work.cards if isinstance(spec.work, ServeSpec) else None
        count = min(cards or group.devices_per_node, group.devices_per_node)
        own = {device.selector: device for device in self.devices if device.host == host}
        listed = next((variables[name] for name in support.visible_devices if variables.get(name)), None)
        if len(own) >= count and not (host and listed):
            names = list(own)
        else:
            names = [word.strip() for word in listed.split(",")] if listed else [str(place) for place in range(count)]
        chip = group.chip.name
        places = enumerate(names[:count])
        return tuple(own.get(name) or Device(index=place, chip=chip, host=host, name=name) for place, name in places)

    def _variables_of(self, host: str) -> tuple[EngineSupport, Mapping[str, str]]:
        """Return the engine support of a host's chip, and the variables of the spec there."""
        spec = self.task.spec
        setup = self.setups[self.group_of_hosts[host]] if self.setups and host in self.group_of_hosts else None
        of_group, of_host = setup.envs if setup else spec.cluster.envs, spec.cluster.host_envs.get(host, {})
        return setup.support if setup else self.support, {**spec.envs, **of_group, **of_host}

    def selecting(self, devices: Sequence[Device] = ()) -> Platform:
        """Return the platform with variables of the spec that select `devices` of this machine or, without any, the
        devices of a trial. Hosts get variables only where their devices are not those from 0.
        """
        spec = self.task.spec
        if not spec.on_each_host:
            chosen = devices or (self.devices_of() if self.devices else ())
            variables = device_variables(self.support, chosen) if chosen else {}
            return replace(self, task=replace(self.task, spec=replace(spec, envs={**spec.envs, **variables})))
        of_hosts = dict(spec.cluster.host_envs)
        for host in dict.fromkeys(device.host for device in self.devices):
            support, own = self._variables_of(host)
            found = self.devices_of(host)
            is_default = all(each.selector == str(place) and not each.within for place, each in enumerate(found))
            if not is_default and not own.keys() & set(support.visible_devices):
                of_hosts[host] = {**of_hosts.get(host, {}), **device_variables(support, found)}
        cluster = replace(spec.cluster, host_envs=of_hosts)
        return replace(self, task=replace(self.task, spec=replace(spec, cluster=cluster)))

    def elsewhere(self) -> Platform:
        """Return the platform for a place that assigns devices itself: without those of this machine."""
        spec = self.task.spec
        spec = replace(spec, envs=without_devices(self.support, spec.envs))
        return replace(self, task=replace(self.task, spec=spec), devices=())

    def prepared(self, planned: Launch) -> Launch:
        """Return `planned` with the environment of plugins and of the spec.

        On hosts of several node groups, each host has those of its own chip, and SLOTS and KIND are replaced. A host
        also has its own variables of the spec.
        """
        spec, own = self.task.spec, self.task.spec.cluster.host_envs
        if not (planned.hosts and (self.setups or own)):
            return self._with_environment(planned)
        of_hosts = (each for each in self.setups for _ in range(each.nodes))
        setups = dict(zip(spec.cluster.hosts, of_hosts, strict=False))
        on_host = {host: self._with_environment(planned, setups.get(host), own.get(host, {})) for host in planned.hosts}
        return replace(on_host[planned.hosts[0]], on_host=on_host)

    def _with_environment(
        self, planned: Launch, setup: HostSetup | None = None, of_host: Mapping[str, str] = MappingProxyType({})
    ) -> Launch:
        """Return the launch of a host with its own variables `of_host`; `setup` is that of several node groups."""
        spec, argv = self.task.spec, planned.argv
        of_chip, of_group = self.environment, spec.cluster.envs
        if setup:
            of_chip, of_group = setup.environment, setup.envs
            argv = tuple(word.replace(SLOTS, str(setup.devices)).replace(KIND, setup.kind) for word in argv)
        environment = {**planned.environment, **of_chip, **spec.envs, **of_group, **of_host}
        return replace(planned, argv=argv, environment=environment)

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


class Plugins(Protocol):
    """The hooks of all plugins as typed methods. The results of plugins that fail are left out."""

    def devices(self, variables: Mapping[str, str] | None = None) -> tuple[Device, ...]: ...
    def detection_failures(self) -> Mapping[str, str]: ...
    def chips(self) -> tuple[Chip, ...]: ...
    def measured_chip(self, chip: Chip) -> Chip: ...
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
    def pruning_rules(
        self, task: Task, engine_version: str | None = None
    ) -> tuple[tuple[ValueRule, ...], tuple[PruningRule, ...]]: ...
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


class Launcher(ABC):
    """Starts launches on this machine or on other hosts. It must define `name` and `start`."""

    name: str

    @abstractmethod
    def start(self, launch: Launch) -> RunningLaunch:
        """Start `launch` in its own process group. Raises FlagError if it cannot be started."""

    def close(self) -> None:  # noqa: B027  (a default, not abstract)
        """End all processes that the launcher keeps between launches, by default none."""

    def has_allocation(self) -> bool:
        """Return whether flagcore runs in an allocation of several hosts, by default False. Must return at once."""
        return False

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        """Return the hosts for trials if the spec does not name them. Empty, the default, if there are none.

        `nodes` is the number of nodes in the spec, by default 1. Raises FlagError if the hosts cannot be listed.
        """
        return ()

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return those of `hosts` that have not failed too often, by default all."""
        return tuple(hosts)

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return the first `count` of `hosts` that have not failed, for the next trial, by default the first.

        Raises FlagError if too few are left.
        """
        return tuple(hosts[:count])

    def resume(self, lost: Iterable[str], cut_off: Iterable[str]) -> None:  # noqa: B027  (a default, not abstract)
        """Continue a run: prefer hosts that were not `lost`, and end remaining processes of the trials with the folders
        `cut_off`. By default nothing is done.
        """
