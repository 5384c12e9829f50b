"""The device of one rank: selection, synchronization, time (seconds), memory (bytes), and a speed test.

On an accelerator the memory comes from torch's allocator and the driver. On a CPU `device_used_bytes` is the rank's
peak resident memory, and `peak_allocated_bytes` is the growth of anonymous memory since its process groups were
created; there is no reserved memory. The clock of a rank on a CPU is the time of its main thread, without waits for
other ranks.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from flagcore.engines.megatron.trial.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_EXACT_THRESHOLD, _FAST_THRESHOLD = 64 << 10, 32 << 20
"""Sizes from which the C library maps each block separately (mallopt(3)). Such blocks are returned to the system
when they are freed, so resident memory is exact; smaller blocks are reused, which is faster. `_FAST_THRESHOLD` is
the library's maximum."""


class Cpu:
    """The host itself."""

    device = torch.device("cpu")
    needs_memory_step = True
    """Whether an additional, untimed step measures the peaks (`training.memory_step`)."""

    def __init__(self) -> None:
        _set_mmap_threshold(_EXACT_THRESHOLD)
        self._peak_allocated = self._peak = 0
        self.set_baseline()

    def synchronize(self) -> None:
        """Do nothing: a CPU has no work in the background."""

    def clock(self) -> float:
        """Return the seconds of this rank's own work so far."""
        return time.thread_time()

    def set_baseline(self) -> None:
        """Exclude the memory allocated so far (process groups) from the measurements."""
        self.start_peak()
        self._baseline = _status_bytes("VmRSS") - _status_bytes("RssFile")

    def reset_after_build(self) -> None:
        """Do nothing: on a CPU the peak occurs in training, not while the model is built."""

    def allocated_bytes(self) -> int:
        """Return the anonymous memory above the baseline, after freed blocks are returned to the system."""
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        return max(0, _status_bytes("VmRSS") - _status_bytes("RssFile") - self._baseline)

    def start_peak(self) -> None:
        """Reset the system's peak of resident memory, if the process has the permission."""
        self._peak = max(self._peak, _status_bytes("VmHWM"))
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the peak of anonymous memory above the baseline."""
        return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - self._baseline)

    def end_memory_measurement(self, peak: int) -> None:
        """Store `peak` as the peak of the run, and end the measurement of memory."""
        self._peak_allocated = peak
        _set_mmap_threshold(_FAST_THRESHOLD)

    def memory(self) -> dict[str, int | None]:
        """Return the peaks so far, by their names in the metrics."""
        used = max(self._peak, _status_bytes("VmHWM"))
        return _memory(self._peak_allocated, None, used)


class Accelerator:
    """A device with a torch module such as torch.cuda."""

    needs_memory_step = False

    def __init__(self, kind: str, rank: int) -> None:
        self._module: Any = getattr(torch, kind)
        index = rank % self._module.device_count()
        self._module.set_device(index)
        self.device = torch.device(kind, index)
        self._peak_allocated = 0

    def synchronize(self) -> None:
        self._module.synchronize()

    def clock(self) -> float:
        """Return the host's clock after the device has finished: it works only for this rank."""
        self._module.synchronize()
        return time.perf_counter()

    def set_baseline(self) -> None:
        """Do nothing: the allocator counts only tensors."""

    def reset_after_build(self) -> None:
        """Return cached blocks to the driver and restart the peaks."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()

    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated())

    def start_peak(self) -> None:
        self._peak_allocated = max(self._peak_allocated, self.peak_bytes())
        self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated())

    def end_memory_measurement(self, peak: int) -> None:
        self._peak_allocated = max(self._peak_allocated, peak)

    def memory(self) -> dict[str, int | None]:
        """Return the allocator's peaks, and the memory that all processes use now according to the driver."""
        free, total = self._module.mem_get_info()
        peak = max(self._peak_allocated, self.peak_bytes())
        return _memory(peak, self._module.max_memory_reserved(), total - free)


RankDevice: TypeAlias = Cpu | Accelerator


def open_device(kind: str, rank: int) -> RankDevice:
    """Return this rank's device; `kind` is its type in torch."""
    return Cpu() if kind == "cpu" else Accelerator(kind, rank)


def _memory(allocated: int, reserved: int | None, used: int) -> dict[str, int | None]:
    return {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "device_used_bytes": used}


def _set_mmap_threshold(size: int) -> None:
    """Set the size from which the C library maps blocks separately, if it has mallopt."""
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, size)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * size)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


SIZE, PRODUCTS, ROUNDS = {"cpu": 256}, 8, 4
ACCELERATOR_SIZE = 4096
"""Rows and columns of the product; the test takes about 30 ms on a core or an accelerator."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def speed_test(job: Job, rank_device: RankDevice) -> float | None:
    """Return the wall time of `PRODUCTS` matrix products in the fastest of `ROUNDS` rounds, None if they do not fit.

    All ranks start together, so devices that share power, cooling or cores also do so here. Call it after the steps and
    after `memory()`: it changes the peaks.
    """
    size = SIZE.get(job.device.type, ACCELERATOR_SIZE)
    dtype = torch.float32 if job.device.type == "cpu" else _DTYPES[job.train.precision]
    is_ready = False
    with suppress(RuntimeError):  # out of memory must not fail a trial that has finished
        factor = torch.ones(size, size, dtype=dtype, device=rank_device.device)
        product = torch.empty_like(factor)
        torch.mm(factor, factor, out=product)
        is_ready = True
    best_s = float("inf")
    for _ in range(ROUNDS):
        rank_device.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PRODUCTS if is_ready else 0):
            torch.mm(factor, factor, out=product)
        rank_device.synchronize()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s if is_ready else None
