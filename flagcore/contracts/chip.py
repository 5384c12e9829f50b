"""What plugins answer of a chip: memory, kernels, collectives, telemetry, rules. A plugin need not inherit anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from flagcore.domain.devices import DeviceUse
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray


class MemoryModel(Protocol):
    """From what tensors take to what the device shows, in bytes of one device. Called with whole columns."""

    def capacity_bytes(self) -> float | None:
        """Return the memory that a trial may use on one device, or None if unknown."""

    def workspace_bytes(self) -> float:
        """Return the allocator's memory for one thread's workspace of the matrix library."""

    def reserved_bytes(self, allocated: FloatArray) -> FloatArray:
        """Return the memory that the allocator reserves for tensors of `allocated` bytes at their peak."""

    def device_used_bytes(self, reserved: FloatArray) -> FloatArray:
        """Return the memory in use that the device shows: `reserved`, context, libraries and collective buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of causal attention on one device, of a batch of sequences of equal length. The fields broadcast.

    Training has as many `queries` as `keys`. A serving engine asks the same of its steps: a prompt, or a piece of
    one, is `queries` at the end of the `keys` that are then cached; decoding is one query on a context of `keys`,
    `batch` sequences at once, whose keys and values are read from the cache, in pages or in one piece. Sequences of
    several lengths are several elements.
    """

    batch: FloatArray
    """Sequences."""
    heads: FloatArray
    """Query heads of a sequence that this device has."""
    groups: FloatArray
    """Key and value heads that these share: as many as `heads` without grouping."""
    queries: FloatArray
    """Positions computed: the last of the `keys`."""
    keys: FloatArray
    """Positions attended to, cached ones included."""
    head_dim: FloatArray
    """Width of a head; where keys and values differ in it, the mean."""


class KernelCosts(Protocol):
    """Seconds that kernels take on one device, the host's time to launch them not included.

    All sizes are arrays that broadcast; NaN where unknown.
    """

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        """Return the time of C[m,n] = A[m,k] B[k,n] in `precision` (fp32 bf16 fp16 fp8 mxfp8 nvfp4 ...)."""

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of fused causal attention forward: scores, softmax, values."""

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        """Return the time of the backward pass of the same."""

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of an element-wise kernel that reads and writes `bytes_moved` in all."""

    def launch_seconds(self) -> float:
        """Return the time in which the host launches one kernel after another, framework included."""

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time to copy between device and pinned host memory, one way."""

    def run_slowdown(self) -> float:
        """Return the slowdown of kernels in a run on many devices against these times: 1 if they are of such runs.

        Kernels measured alone take longer there: power and clocks of all devices, waits not attributed to any part.
        """


class CollectiveCosts(Protocol):
    """Seconds that collectives take between devices."""

    def seconds(self, kind: str, payload_bytes: FloatArray, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the time of one collective in a group of `ranks` devices that are `stride` devices apart.

        `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or send. `payload_bytes` is the whole
        tensor: the reduced one, the gathered one, what is scattered, what a rank holds before an
        all-to-all, the message. A group of one costs nothing; NaN where unknown.
        """

    def compute_share(self, ranks: IntArray, stride: IntArray) -> FloatArray:
        """Return the share (0 to 1) of a device's compute that a running collective takes from concurrent kernels."""


class Telemetry(Protocol):
    """A reading of one device before and while a trial runs. It may have the method of `ReportsUse`, too."""

    def sample(self) -> Mapping[str, float]:
        """Return figures by name, e.g. `memory_used_bytes`, `power_watts`, `temperature_celsius`.

        Raises LookupError if the device no longer answers, though others do.
        """


class ReportsUse(Protocol):
    """Optional: telemetry that knows who uses its device."""

    def use(self) -> DeviceUse:
        """Return who uses the device now. Called before each trial, and after one that ran out of memory."""


class DescribesDevice(Protocol):
    """Optional: telemetry that knows more of its device."""

    def describe(self) -> Mapping[str, str]:
        """Return `uuid`, `bus` (the PCI address) and `links` (to other devices) as far as known.

        Called by `flag devices`.
        """


def description_of(reader: Telemetry) -> Mapping[str, str]:
    """Return `DescribesDevice.describe`; empty from telemetry without it."""
    describe = getattr(reader, "describe", None)
    return describe() if describe else {}


def use_of(reader: Telemetry) -> DeviceUse:
    """Return `ReportsUse.use`; nothing is known from telemetry without it."""
    use = getattr(reader, "use", None)
    return use() if use else DeviceUse()


class PruningRule(Protocol):
    """A vendor's or user's rule for candidates that are not worth a trial. `name` is counted, `message` is shown."""

    name: str
    message: str

    def prunes(self, columns: Columns, predictions: Predictions) -> BoolArray:
        """Return True for each candidate that should not be tried. Asked in pieces: a row must not depend on others."""
