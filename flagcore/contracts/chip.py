"""The objects that plugins provide for a chip: memory model, kernel and collective costs, telemetry, pruning rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flagcore.domain.devices import DeviceUse
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
