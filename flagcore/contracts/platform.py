"""Protocols of plugins, the base class of launchers, and `Platform`: a task with what plugins provide for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from flagcore.domain.chip import Device, Support
from flagcore.domain.engine import EngineSupport, ValueRule, device_variables, without_devices
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
    """Computes the memory in use on a device from the memory of tensors, in bytes.

    Methods with arrays are called with one element per candidate. The method `communicator_bytes() -> float` is
    optional. It is for chips whose collectives allocate buffers for each communicator, that is, for each group of
    ranks. It returns the bytes of one communicator, which `device_used_bytes` must not include.
    """

    def capacity_bytes(self) -> float | None:
        """Return the bytes that a trial may use on one device, or None if unknown."""

    def workspace_bytes(self) -> float:
        """Return the size of the matrix library's workspace for one host thread."""

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return the memory that the allocator reserves if the peak of tensors is `allocated` bytes."""

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return the memory in use on the device: `reserved` plus context, libraries and collective buffers."""


def communicator_bytes(model: MemoryModel) -> float:
    """Return the bytes of one communicator's buffers, or 0.0 if `model` does not define `communicator_bytes`."""
    buffers = getattr(model, "communicator_bytes", None)
    return float(buffers()) if buffers else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The sizes of causal attention on one device for a batch of sequences of equal length.

    The fields are arrays that broadcast. Sequences of different lengths are separate elements. In training, `queries`
    equals `keys`. In serving, prefill computes the last `queries` of the `keys` positions, and decoding computes one
    query per sequence, with keys and values in the KV cache.
    """

    batch: FloatArray
    """Number of sequences."""
    heads: FloatArray
    """Number of query heads on this device."""
    groups: FloatArray
    """Number of key and value heads on this device; equal to `heads` without grouping."""
    queries: FloatArray
    """Number of positions whose attention is computed: the last ones of `keys`."""
    keys: FloatArray
    """Number of positions that the last query attends to, including cached ones."""
    head_dim: FloatArray
    """Width of a head. If keys and values have different widths, their mean."""


class KernelCosts(Protocol):
    """The times of kernels on one device in seconds, without the host's time to launch them.

    All sizes are arrays that broadcast, with one element per kernel. Unknown times are NaN.
    """

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of C[m,n] = A[m,k] B[k,n] in `precision` (fp32 bf16 fp16 fp8 mxfp8 nvfp4 ...)."""

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the forward pass of fused causal attention."""

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the backward pass of fused causal attention."""

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel whose reads and writes sum to `bytes_moved` bytes."""

    def launch_seconds(self) -> float:
        """Return the host's time to launch one kernel, including the framework."""

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of a copy between device and pinned host memory in one direction."""

    def run_slowdown(self) -> float:
        """Return the factor by which kernels are slower in a run on many devices than these times.

        It is 1 if the times were measured in such runs. Otherwise it is larger, because power limits, lower clocks and
        waiting times make kernels slower in a run than alone.
        """


class CollectiveCosts(Protocol):
    """The times of collectives between devices in seconds."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective in a group of `ranks` devices that are `stride` devices apart. The arrays
        broadcast.

        `kind`: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        `payload_bytes`: for a send, the size of the message. For an all-to-all, the size of a rank's tensor before it.
        Otherwise the size of the whole reduced, gathered or scattered tensor.

        The time is 0 for one rank, and NaN if it is unknown.
        """

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share (0 to 1) of a device's compute that a running collective takes from concurrent kernels."""


class Telemetry(Protocol):
    """Reads figures of one device before and during a trial.

    The method `use() -> DeviceUse` is optional. It reports which processes use the device. It is called before each
    trial, and after a trial that ran out of memory.
    """

    def sample(self) -> Mapping[str, float]:
        """Return the current figures by name, such as `memory_used_bytes`, `power_watts` or `temperature_celsius`.

        Raises LookupError if this device does not respond, but others do.
        """


def device_use(reader: Telemetry) -> DeviceUse:
    """Return the result of the reader's optional method `use`, or an empty DeviceUse if it has none."""
    use = getattr(reader, "use", None)
    return use() if use else DeviceUse()


class PruningRule(Protocol):
    """A rule that removes candidates that are not worth a trial.

    Reports show its `name`, its `message`, and the number of candidates that it removed.
    """

    name: str
    message: str

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return a boolean array: True for each candidate to remove.

        Called with blocks of candidates. The answer for a candidate must not depend on the others in its block.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost models of a task, from plugins or else from the core.

    If there are several node groups, `memory`, `kernels` and `collectives` belong to the first group.

    `guessed`: whether kernel times come from the core's roofline, neither measured nor fitted.
    `assumed_network`: whether the network rate is `flagcore.domain.chip.ASSUMED_NETWORK`, because none is known.
    `synchronous`: whether the host computes, as on a CPU. Then kernels do not hide the time of launches.
    `run_slowdown`: the factor by which kernels are slower in a run on many devices than in `kernels`.
    `further`: the costs of the other node groups, by the rank of their first device, in the order of ranks.
    `between`: the times of messages between node groups. None if there is only one group.
    """

    memory: MemoryModel
    kernels: KernelCosts
    collectives: CollectiveCosts
    guessed: bool = False
    assumed_network: bool = False
    synchronous: bool = False
    run_slowdown: float = 1.0
    further: Mapping[int, Costs] = field(default_factory=dict)
    between: CollectiveCosts | None = None

    @property
    def groups(self) -> tuple[Costs, ...]:
        """The costs of each node group, in the order of ranks."""
        return (self, *self.further.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """How trials start on the hosts of a node group, if there are several groups.

    `kind`: the type of the hosts in host files.
    `devices`: the number of devices per host.
    `environment`: environment variables from the chip's plugin.
    `envs`: the group's environment variables in the spec.
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

    `telemetry`: a reader for each device whose figures can be read.
    `value_rules`: the values that do not work.
    `knobs`: all plugins' knobs for the chip, including those that the spec does not name.
    `conflicts`: descriptions of environment variables that the user and a plugin set to different values.
    `devices`: the detected devices of the task's chips that its trials can use, in order.
    `cores`: the CPU cores that trials can use. Empty means all.
    `setups`: how trials start on each node group, in order. Empty if there is only one group.
    `precision_reason`: why the precision was chosen. Empty if the spec sets it.
    """

    task: Task
    workload: Workload
    costs: Costs
    support: EngineSupport = field(default_factory=lambda: EngineSupport(support=Support.YES))
    environment: Mapping[str, str] = field(default_factory=dict)
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
        """The index of each host's node group. Empty if the spec names no hosts."""
        groups, hosts = self.task.cluster.groups, self.task.spec.cluster.hosts
        if len(groups) == 1:
            return dict.fromkeys(hosts, 0)
        return dict(zip(hosts, (index for index, group in enumerate(groups) for _ in range(group.nodes)), strict=False))

    def on_hosts(self, hosts: tuple[str, ...]) -> Platform:
        """Return the platform for trials on `hosts` only."""
        spec = self.task.spec
        task = replace(self.task, spec=replace(spec, cluster=replace(spec.cluster, hosts=hosts)))
        devices = tuple(device for host in hosts for device in self.devices if device.host == host)
        return replace(self, task=task, devices=devices)

    def devices_of(self, host: str = "") -> tuple[Device, ...]:
        """Return the devices that a trial uses on `host`, or on this machine if `host` is empty.

        These are the first detected devices. There are two exceptions: if too few devices were detected, or if
        environment variables of the spec select devices of another host, which detection there does not see. Then they
        are the devices that the spec selects, or else devices numbered from 0.
        """
        spec, group = self.task.spec, self.task.cluster.groups[self.group_of_hosts.get(host, 0)]
        support, variables = self._variables_of(host)
        cards = spec.work.cards if isinstance(spec.work, ServeSpec) else None
        count = min(cards or group.devices_per_node, group.devices_per_node)
        detected = {device.selector: device for device in self.devices if device.host == host}
        listed = next((variables[name] for name in support.visible_devices if variables.get(name)), None)
        if len(detected) >= count and not (host and listed):
            names = list(detected)
        else:
            names = [word.strip() for word in listed.split(",")] if listed else [str(place) for place in range(count)]
        chip = group.chip.name
        places = enumerate(names[:count])
        return tuple(
            detected.get(name) or Device(index=place, chip=chip, host=host, name=name) for place, name in places
        )

    @property
    def readers(self) -> tuple[tuple[int, Device, Telemetry], ...]:
        """The devices of a trial with telemetry: the number in the whole cluster, the device and its reader."""
        groups = self.task.cluster.groups
        counts = {host: groups[index].devices_per_node for host, index in self.group_of_hosts.items()}
        starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        return tuple(
            (starts.get(host, 0) + place, device, self.telemetry[device])
            for host in dict.fromkeys(device.host for device in self.devices)
            for place, device in enumerate(self.devices_of(host))
            if device in self.telemetry
        )

    def _variables_of(self, host: str) -> tuple[EngineSupport, Mapping[str, str]]:
        """Return the engine support on a host's chip, and the environment variables that the spec sets on that host."""
        spec = self.task.spec
        setup = self.setups[self.group_of_hosts[host]] if self.setups and host in self.group_of_hosts else None
        of_group, of_host = setup.envs if setup else spec.cluster.envs, spec.cluster.host_envs.get(host, {})
        return setup.support if setup else self.support, {**spec.envs, **of_group, **of_host}

    def selecting(self, devices: Sequence[Device] = ()) -> Platform:
        """Return the platform with environment variables in its spec that select devices.

        On this machine, they select `devices` or, if that is empty, the devices of a trial. Other hosts get variables
        only if a trial does not use their devices from 0 upwards.
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
        """Return the platform without this machine's devices, for a host or pod that assigns devices itself."""
        spec = self.task.spec
        spec = replace(spec, envs=without_devices(self.support, spec.envs))
        return replace(self, task=replace(self.task, spec=spec), devices=())

    def prepared(self, planned: Launch) -> Launch:
        """Return the launch `planned` with the environment variables of plugins and of the spec.

        With several node groups, each host gets the variables of its own chip, and SLOTS and KIND are replaced in the
        command. A host also gets the variables that the spec sets for it.
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
        """Return the launch of one host.

        `setup`: the setup of the host's node group. None if there is only one group.
        `of_host`: the variables that the spec sets for this host.
        """
        spec, argv = self.task.spec, planned.argv
        of_chip, of_group = self.environment, spec.cluster.envs
        if setup:
            of_chip, of_group = setup.environment, setup.envs
            argv = tuple(word.replace(SLOTS, str(setup.devices)).replace(KIND, setup.kind) for word in argv)
        environment = {**planned.environment, **of_chip, **spec.envs, **of_group, **of_host}
        return replace(planned, argv=argv, environment=environment)

    def limited(self, planned: Launch, limit: TimeLimit) -> Launch:
        """Return the launch `planned` with the time, memory and disk limits of a trial."""
        return replace(
            planned,
            timeout_seconds=limit.seconds,
            timeout_because=limit.because,
            memory_limit_bytes=self.memory_limit_bytes,
            disk_limit_bytes=self.task.spec.control.disk_limit or planned.disk_limit_bytes,
        )

    @property
    def memory_limit_bytes(self) -> int | None:
        """The bytes that the processes of a node may use, if its devices share the memory of the machine. Else None."""
        group = self.task.cluster.groups[0]
        memory = group.memory_bytes * group.devices_per_node if group.memory_bytes else None
        return memory if self.support.shared_devices else None


class RunningLaunch(Protocol):
    """A launch that was started, and may still be running."""

    def wait(self, seconds: float) -> Exit | None:
        """Wait at most `seconds` for the launch to end. Return its exit, or None if it is still running."""

    def stop(self) -> Exit:
        """End the whole process tree if it is still running, and return the exit."""


class Launcher(ABC):
    """The base class of launchers, which start programs on this machine or on other hosts.

    A launcher must define `name` and `start`. All other methods have defaults.
    """

    name: str

    @abstractmethod
    def start(self, launch: Launch) -> RunningLaunch:
        """Start `launch` in its own process group. Raises FlagError if it cannot be started.

        If it raises HostLost, flagcore tries again, for at most `cluster.wait_for_hosts` seconds.
        """

    def close(self) -> None:  # noqa: B027  (a default, not abstract)
        """End all processes that the launcher keeps running between launches. By default there are none."""

    def has_allocation(self) -> bool:
        """Return whether flagcore runs in an allocation of several hosts. Must return at once. By default False."""
        return False

    def find_hosts(self, nodes: int, /) -> tuple[str, ...]:
        """Return the hosts for trials if the spec does not name them. By default there are none.

        `nodes`: the number of nodes in the spec.
        Raises FlagError if the hosts cannot be listed.
        """
        return ()

    def usable_hosts(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Return the hosts in `hosts` that have not failed too often. By default all."""
        return tuple(hosts)

    def choose_hosts(self, hosts: Sequence[str], count: int) -> tuple[str, ...]:
        """Return the hosts for the next trial: the first `count` of `hosts` that have not failed.

        By default failures are ignored. Raises FlagError if too few hosts are left.
        """
        return tuple(hosts[:count])

    def give_up(self, host: str) -> None:  # noqa: B027  (a default, not abstract)
        """Do not use a host any more, because flagcore has waited for it in vain. By default nothing is done."""

    def resume(self, lost: Iterable[str], cut_off: Iterable[str]) -> None:  # noqa: B027  (a default, not abstract)
        """Prepare to resume a run. By default nothing is done.

        `lost`: hosts that were lost. Other hosts are preferred.
        `cut_off`: folders of trials that were interrupted. Their remaining processes are ended.
        """
