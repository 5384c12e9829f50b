"""What plugins provide: Protocols of costs, telemetry and pruning rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flagcore.domain.chip import DeviceUse
from flagcore.domain.cluster import Cluster
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray


class MemoryModel(Protocol):
    """Computes the memory in use on a device from the memory of tensors, in bytes.

    Methods with arrays are called with one element per candidate. Optional are the method `communicator_bytes() ->
    float`, the bytes that collectives allocate for each communicator (a group of ranks), and `further`, estimates of
    those of each one after the first, and of one that reaches other hosts. `device_used_bytes` must not include them.
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
    """Number of positions whose attention is computed: the last `queries` of the `keys` positions."""
    keys: FloatArray
    """Number of positions that the last query attends to, including cached ones."""
    head_dim: FloatArray
    """Width of a head. If keys and values have different widths, their mean."""
    kernel: str = ""
    """The library of the kernel, in the engine's words. Empty: the one that the chip's software uses by default."""

    @property
    def sizes(self) -> tuple[FloatArray, ...]:
        """The fields that are arrays."""
        return self.batch, self.heads, self.groups, self.queries, self.keys, self.head_dim


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
        """Return the ratio of kernel times in a run on many devices to the times that this object returns.

        The ratio is 1 if the times were measured in such runs. Otherwise it is larger: in a run, power limits, lower
        clocks and waiting times slow kernels down.
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
    """Reads the metrics of one device before and during a trial.

    The method `use() -> DeviceUse` is optional. It reports which processes use the device. It is called before each
    trial, and after a trial that ran out of memory.
    """

    def sample(self) -> Mapping[str, float]:
        """Return the current metrics by name, such as `memory_used_bytes`, `power_watts` or `temperature_celsius`.

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

    `guessed`: whether kernel times come from the core's roofline, neither measured nor fitted, or no server of the
    engine was checked on the chip.
    `assumed_network`: whether the network rate is `flagcore.domain.chip.ASSUMED_NETWORK`, because none is known.
    `synchronous`: whether the host computes, as on a CPU. Then kernels do not hide the time of launches.
    `overheads`: overheads of a server that differ on the chip, by name.
    `run_slowdown`: the ratio of kernel times in a run on many devices to the times of `kernels`.
    `further`: the costs of each further node group, by the rank of the group's first device, in the order of ranks.
    `between`: the times of messages between node groups. None if there is only one group.
    `others`: returns the costs of another engine on a cluster, from the same plugins. None: the same costs.
    """

    memory: MemoryModel
    kernels: KernelCosts
    collectives: CollectiveCosts
    guessed: bool = False
    assumed_network: bool = False
    synchronous: bool = False
    overheads: Mapping[str, object] = field(default_factory=dict)
    run_slowdown: float = 1.0
    further: Mapping[int, Costs] = field(default_factory=dict)
    between: CollectiveCosts | None = None
    others: Callable[[Cluster, str], Costs] | None = field(default=None, repr=False, compare=False)

    def of(self, cluster: Cluster, engine: str) -> Costs:
        """Return the costs of an engine that does a part of the task, on a part of its cluster."""
        return self.others(cluster, engine) if self.others else self

    @property
    def groups(self) -> tuple[Costs, ...]:
        """The costs of each node group, in the order of ranks."""
        return (self, *self.further.values())
