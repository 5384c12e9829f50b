"""The kernels to measure: matrix products, attention, memory operations, copies and launches.

`Bench` measures the times of calls, synchronized with the processes on the other devices.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from flagcore_training.microbench import BenchmarkJob

SAMPLE_SECONDS = 1e-3
"""Minimum duration of a sample of calls. With it, the overhead of the timer is negligible."""

MAX_SAMPLES, MIN_SAMPLES = 25, 3

TIME_QUANTILE = 0.1
"""Quantile of the samples that is the time of a call. It is low, because disturbances only make calls slower."""

MAX_QUEUED_CALLS = 200
"""Maximum number of launched calls that an accelerator has not yet executed."""
FILL_SECONDS = 0.02
"""Seconds for which at most `MAX_QUEUED_CALLS` fills of memory keep an accelerator busy while the host launches the
measured calls."""


@dataclass(frozen=True)
class Timing:
    """The seconds of one call, the number of samples (`repeats`), and the samples' relative `spread`."""

    seconds: float
    spread: float
    repeats: int


class Bench:
    """Measures calls on one device. All processes must measure the same calls in the same order."""

    def __init__(self, kind: str, number: int, is_distributed: bool) -> None:
        self.cpu, self._is_distributed = kind == "cpu", is_distributed
        self._module: Any = getattr(torch, kind)
        self._filler: torch.Tensor | None = None
        self._fill_calls = 0
        if not self.cpu:
            self._module.set_device(number)
        self.device = torch.device(kind) if self.cpu else torch.device(kind, number)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if not self.cpu:
            self._module.synchronize()

    def agree(self, value: float) -> float:
        """Return the maximum of `value` over all processes, so that they all continue with the same value."""
        if not self._is_distributed:
            return value
        shared = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.item())

    def time(self, call: Callable[[], object], seconds: float, *, alone: bool = True) -> Timing:
        """Return the time of `call` on the slowest device, measured for about `seconds`.

        On an accelerator, it is the device's time. On a CPU with one thread, a call that runs `alone` is measured in
        processor time, which does not depend on other load.
        """
        call()
        once = self.agree(self.seconds_of(call, 1))
        if once < SAMPLE_SECONDS:
            calls = max(1, min(MAX_QUEUED_CALLS, int(SAMPLE_SECONDS / once)))
            once = self.agree(self.seconds_of(call, calls) / calls)
        calls = max(1, min(MAX_QUEUED_CALLS, int(SAMPLE_SECONDS / max(once, 1e-7))))
        samples = int(max(MIN_SAMPLES, min(MAX_SAMPLES, seconds / (once * calls))))
        self.agree(0.0)
        sample = self._device
        if self.cpu:
            sample = self._core if alone and torch.get_num_threads() == 1 else self.seconds_of
        times = sorted(sample(call, calls) / calls for _ in range(samples))
        median, spread = times[len(times) // 2], times[(3 * len(times)) // 4] - times[len(times) // 4]
        return Timing(self.agree(times[int(TIME_QUANTILE * len(times))]), spread / median, samples)

    def host_time(self, call: Callable[[], object], calls: int) -> Timing:
        """Return the processor time that the host needs to launch `call`, without waiting for the device."""
        call()
        times = []
        for _ in range(MIN_SAMPLES):
            self.synchronize()
            times.append(self._core(call, calls) / calls)
        self.synchronize()
        times.sort()
        return Timing(times[1], (times[-1] - times[0]) / times[1], MIN_SAMPLES)

    @staticmethod
    def _core(call: Callable[[], object], calls: int) -> float:
        """Return the processor time of `calls` calls, in seconds."""
        start = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - start

    def seconds_of(self, call: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of `calls` calls on the host's clock, including their work on the device."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def _device(self, call: Callable[[], object], calls: int) -> float:
        """Return the seconds of `calls` calls on the device's clock, or on the host's if the device has none.

        The device is busy while the host launches the calls, so the result does not contain launches.
        """
        if not hasattr(self._module, "Event"):
            return self.seconds_of(call, calls)
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        if self._filler is None:
            self._filler = torch.zeros(64 << 20, dtype=torch.uint8, device=self.device)
        if not self._fill_calls:
            self._filler.bitwise_not_()
            once = max(self.seconds_of(self._filler.bitwise_not_, MIN_SAMPLES) / MIN_SAMPLES, 1e-6)
            # With slow memory, MAX_QUEUED_CALLS fills would take seconds.
            self._fill_calls = min(MAX_QUEUED_CALLS, math.ceil(FILL_SECONDS / once))
        for _ in range(self._fill_calls):  # keeps the device busy while the host launches the measured calls
            self._filler.bitwise_not_()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}

ROWS = (1.0, 16.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0)
SIDES = tuple(2.0**power for power in range(7, 15))
LENGTHS = (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0)
HEADS = ((1.0, 8.0, 8.0, 64.0), (1.0, 16.0, 4.0, 128.0), (8.0, 8.0, 8.0, 64.0))
"""Shapes of attention to measure: number of sequences, heads and groups, and the width of a head."""
BYTES = tuple(2.0**power for power in (12, 16, 20, 22, 24, 26, 28, 30))
ELEMENTWISE_KERNELS = {
    "copy": (2, 0, 2.0**28),
    "cast": (1, 1, 2.0**30),
    "mul": (3, 0, 2.0**30),
    "sigmoid": (2, 0, 2.0**24),
    "accumulate": (1, 2, 2.0**26),
}
"""The element-wise kernels to measure, with their memory accesses and maximum sizes.

Each entry: the number of 16-bit tensors (fp32 if there is no 16-bit format) and of fp32 tensors that the kernel reads
and writes, and its maximum size in training in bytes. The size of `sigmoid` is limited by activations, the size of
`accumulate` by weights. The optimizer has the largest kernels."""
NOISE_LENGTH = (1 << 16) + 1
ROUNDS = 2

MIN_CALLS = 6
"""Minimum number of calls of an item that must fit into the remaining time; otherwise the item is skipped."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A kernel to measure: its record without times (`row`), its amount of `work`, and the function `make`.

    `make` creates the tensors and returns the call to measure.
    """

    row: Row
    work: float
    make: Callable[[], Callable[[], object]]


def measured(bench: Bench, items: list[Item], seconds: float, *, alone: bool = True) -> Iterator[Row]:
    """Measure the items within `seconds`, and yield their records. Items that would take too long are skipped.

    Each item is measured in two rounds, and the shorter time is used, in case a disturbance lasts some seconds. A
    coarse selection of sizes is measured first: if the time is short, intermediate sizes are missing, not the large
    ones.
    """
    items = sorted(items, key=lambda item: item.work)
    order = [index for first in (0, 4, 2, 6, 1, 5, 3, 7) for index in range(first, len(items), 8)]
    timings: dict[int, Timing] = {}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for done, index in enumerate(order):
            seconds_left = seconds / ROUNDS - bench.agree(time.perf_counter() - start)
            if seconds_left <= 0 or MIN_CALLS * _expected_seconds(items, timings, index) > seconds_left:
                continue
            timing = bench.time(items[index].make(), 0.7 * seconds_left / (len(items) - done), alone=alone)
            if index not in timings or timing.seconds < timings[index].seconds:
                timings[index] = timing
    return (items[index].row | record(timing) for index, timing in sorted(timings.items()))


def _expected_seconds(items: list[Item], timings: dict[int, Timing], index: int) -> float:
    """Estimate the seconds of an item from the nearest measured item, scaled up if the item has more work."""
    if not timings:
        return 0.0
    nearest = min(timings, key=lambda other: abs(other - index))
    return timings[nearest].seconds * max(1.0, items[index].work / items[nearest].work)


def record(timing: Timing) -> Row:
    """Return a timing as the fields of a record in the output."""
    return {"us": round(timing.seconds * 1e6, 4), "spread": round(timing.spread, 4), "repeats": timing.repeats}


def is_supported(bench: Bench, make: Callable[[], Callable[[], object]]) -> bool:
    """Return whether the device supports the call that `make` creates."""
    try:
        make()()
        bench.synchronize()
    except (RuntimeError, NotImplementedError, AttributeError, KeyError, AssertionError):
        return False
    return True


def gemms(bench: Bench, job: BenchmarkJob, precision: str) -> list[Item]:
    """Return matrix products of common sizes in one precision; none if torch does not support the precision."""
    if not is_supported(bench, partial(product, bench.device, 64, 64, 64, precision)):
        return []
    items = []
    for side in SIDES:
        for n, k in ((side, side), (4 * side, side), (side, 4 * side)):
            for m in ROWS:
                fits = 4.0 * (m * n + m * k + n * k) < job.memory_bytes / 4 and k <= SIDES[-1]
                if fits and (precision != "fp8" or m >= 16.0):  # torch's 8-bit product needs multiples of 16
                    row = {"kernel": "gemm", "precision": precision, "m": int(m), "n": int(n), "k": int(k)}
                    make = partial(product, bench.device, m, n, k, precision)
                    items.append(Item(row, m * n * k + 20.0 * (m * n + m * k + n * k), make))
    return items


def product(device: torch.device, m: float, n: float, k: float, precision: str) -> Callable[[], object]:
    """Return a call of the matrix product C[m,n] = A[m,k] B[k,n], laid out as in the forward pass of a linear layer."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if precision == "fp8":
        left, right = (noise(device, "fp32", int(rows), int(k)).to(torch.float8_e4m3fn) for rows in (m, n))
        unit = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)
    left, right = (noise(device, precision, int(rows), int(k)) for rows in (m, n))
    return lambda: torch.matmul(left, right.t())


def noise(device: torch.device, precision: str, *shape: int) -> torch.Tensor:
    """Return normally distributed values, like activations: the power and the clock of a chip depend on the data.

    A block of values is repeated, because generating all values would take longer than the measurement.
    """
    count = math.prod(shape)
    block = torch.randn(NOISE_LENGTH, device=device, dtype=DTYPES[precision])
    return block.repeat(-(-count // NOISE_LENGTH))[:count].view(shape)


def attentions(bench: Bench, job: BenchmarkJob, precision: str, *, backward: bool) -> list[Item]:
    """Return calls of causal attention of common sizes in one precision, either forward or backward."""
    name = "attention_backward" if backward else "attention"
    if not is_supported(bench, partial(attention, bench.device, (1, 2, 1, 64, 64), precision, backward)):
        return []
    items = []
    for batch, heads, groups, width in HEADS:
        for length in LENGTHS:
            unfused = 8.0 * batch * heads * length**2  # bytes of the attention scores if there is no fused kernel
            if max(64.0 * batch * heads * length * width, unfused) < job.memory_bytes / 2:
                shape = (int(batch), int(heads), int(groups), int(length), int(width))
                sizes = dict(zip(("batch", "heads", "groups", "queries", "head_dim"), shape, strict=True))
                row = {"kernel": name, "precision": precision, **sizes, "keys": int(length)}
                make = partial(attention, bench.device, shape, precision, backward)
                items.append(Item(row, batch * heads * width * length**2, make))
    return items


def attention(
    device: torch.device, shape: tuple[int, int, int, int, int], precision: str, backward: bool
) -> Callable[[], object]:
    """Return a call of attention whose `shape` is (batch, query heads, key-value heads, length, head width)."""
    batch, heads, groups, length, width = shape

    def tensor(count: int) -> torch.Tensor:
        return noise(device, precision, batch, count, length, width).requires_grad_(backward)

    query, key, value = tensor(heads), tensor(groups), tensor(groups)

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups < heads)

    if not backward:
        return forward
    output = forward()
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)


def memory(bench: Bench, job: BenchmarkJob, precision: str) -> list[Item]:
    """Return memory copies and element-wise kernels. None of them allocates memory."""
    items, width = [], torch.finfo(DTYPES[precision]).bits // 8
    for name, (narrow_tensors, fp32_tensors, max_bytes) in ELEMENTWISE_KERNELS.items():
        bytes_per_element = narrow_tensors * width + fp32_tensors * 4
        for size in (size for size in BYTES if size <= min(max_bytes, job.memory_bytes / 8)):
            count = int(size / bytes_per_element)
            kind = "copy" if name == "copy" else "elementwise"
            row = {"kernel": kind, "name": name, "bytes": count * bytes_per_element}
            items.append(Item(row, size, partial(elementwise, bench.device, name, count, precision)))
    return items


def elementwise(device: torch.device, name: str, count: int, precision: str) -> Callable[[], object]:
    """Return a call of the kernel `name` in `ELEMENTWISE_KERNELS` over `count` elements."""
    first, second = (noise(device, precision, count) for _ in range(2))
    result = torch.empty_like(first)
    fp32 = torch.zeros(count if name in ("cast", "accumulate") else 1, device=device)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: first.copy_(second),
        "cast": lambda: fp32.copy_(first),
        "mul": lambda: torch.mul(first, second, out=result),
        "sigmoid": lambda: torch.sigmoid(first, out=second),
        "accumulate": lambda: fp32.add_(first),
    }
    return calls[name]


def host_copies(bench: Bench) -> list[Item]:
    """Return copies between the device and pinned host memory. The list is empty on a CPU."""
    if bench.cpu:
        return []

    def make(size: float, to_device: bool) -> Callable[[], object]:
        host = torch.empty(int(size), dtype=torch.uint8, pin_memory=True)
        remote = torch.empty(int(size), dtype=torch.uint8, device=bench.device)
        target, source = (remote, host) if to_device else (host, remote)
        return lambda: target.copy_(source, non_blocking=True)

    if not is_supported(bench, partial(make, 1024.0, True)):
        return []
    return [
        Item({"kernel": "host_copy", "name": name, "bytes": int(size)}, size, partial(make, size, name == "to device"))
        for size in (2.0**20, 2.0**24, 2.0**28)
        for name in ("to device", "to host")
    ]


MODULES = 200


class _Product(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """A matrix product with a custom backward pass, like the layers of parallel frameworks."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product of `value` and `weight`."""
        ctx.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `value` and `weight`."""
        value, weight = ctx.saved_tensors
        return gradient * weight, gradient * value


class _Scale(torch.nn.Module):  # type: ignore[misc]
    """A module that launches one tiny kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return `value` times the weight."""
        return _Product.apply(value, self.weight)


def launches(bench: Bench) -> list[Row]:
    """Return records of the host's time per kernel launch in a chain of modules, forward and backward."""
    chain = torch.nn.Sequential(*[_Scale().to(bench.device) for _ in range(MODULES)])
    value, weights = torch.ones(1, device=bench.device), list(chain.parameters())
    forward = bench.host_time(lambda: chain(value), 1)
    end = chain(value)
    backward = bench.host_time(lambda: torch.autograd.grad(end, weights, retain_graph=True), 1)
    return [
        {"kernel": "launch", "name": name, **record(replace(timing, seconds=timing.seconds / (count * MODULES)))}
        for name, timing, count in (("forward", forward, 1), ("backward", backward, 2))  # kernels per module
    ]
