"""The device of one rank: selection, synchronization, time (seconds), memory (bytes), and a speed test.

On an accelerator figures come from torch's allocator and the driver. On a CPU `device_used_bytes` is the rank's peak
resident memory, and `peak_allocated_bytes` the anonymous memory above that after its process groups were created; there
is no reserved memory. A rank's own time on a CPU is that of its main thread, without waiting for other ranks.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from flagcore.engines.megatron.trial.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_EXACT, _FAST = 64 << 10, 32 << 20
"""Sizes from which the C library maps each block separately (mallopt(3)). Such a block is returned when it is freed, so
that resident memory shows what is allocated; smaller ones are reused, which is faster. The larger one is the library's
own maximum."""


@dataclass(frozen=True)
class Memory:
    """The peak memory of one rank."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    device_used_bytes: int


class Cpu:
    """The host itself."""

    device = torch.device("cpu")
    needs_memory_step = True
    """Whether peaks are measured in an additional step that is not timed (`training.memory_step`)."""

    def __init__(self) -> None:
        _set_mmap_threshold(_EXACT)
        self._worst = self._peak = 0
        self.set_baseline()

    def synchronize(self) -> None:
        """Wait until the device has finished its work: nothing runs in the background here."""

    def clock(self) -> float:
        """Wait for the device, and return the seconds of this rank's own work so far."""
        return time.thread_time()

    def set_baseline(self) -> None:
        """Count the memory allocated so far (process groups) as the process's own."""
        self.start_peak()
        self._at_start = _status_bytes("VmRSS") - _status_bytes("RssFile")

    def model_built(self) -> None:
        """Exclude memory that was only needed to build the model; here the peak occurs in training anyway."""

    def allocated_bytes(self) -> int:
        """Return the anonymous memory above the start, small blocks that were freed given back to the system."""
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        return max(0, _status_bytes("VmRSS") - _status_bytes("RssFile") - self._at_start)

    def start_peak(self) -> None:
        """Reset the system's peak; without permission it stays at least the parent's."""
        self._peak = max(self._peak, _status_bytes("VmHWM"))
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the peak of anonymous memory above the start."""
        return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - self._at_start)

    def memory_measured(self, peak: int) -> None:
        """Store `peak` as the peak of the run; memory is not measured after that."""
        self._worst = peak
        _set_mmap_threshold(_FAST)

    def memory(self) -> Memory:
        """Return the peaks so far."""
        return Memory(self._worst, None, max(self._peak, _status_bytes("VmHWM")))


class Accelerator:
    """A device with a torch module such as torch.cuda."""

    needs_memory_step = False

    def __init__(self, kind: str, rank: int) -> None:
        self._module: Any = getattr(torch, kind)
        index = rank % self._module.device_count()
        self._module.set_device(index)
        self.device = torch.device(kind, index)
        self._worst = 0

    def synchronize(self) -> None:
        self._module.synchronize()

    def clock(self) -> float:
        """Return the host's clock once the device is done: it works for this rank alone."""
        self._module.synchronize()
        return time.perf_counter()

    def set_baseline(self) -> None:
        """Nothing to note: the allocator counts tensors alone."""

    def model_built(self) -> None:
        """Return cached blocks to the driver and restart the peaks."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()

    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated())

    def start_peak(self) -> None:
        self._worst = max(self._worst, self.peak_bytes())
        self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return int(self._module.max_memory_allocated())

    def memory_measured(self, peak: int) -> None:
        self._worst = max(self._worst, peak)

    def memory(self) -> Memory:
        """Return the allocator's peaks, and what the driver calls used now (by any process)."""
        free, total = self._module.mem_get_info()
        return Memory(max(self._worst, self.peak_bytes()), self._module.max_memory_reserved(), total - free)


RankDevice: TypeAlias = Cpu | Accelerator


def open_device(kind: str, rank: int) -> RankDevice:
    """Return this rank's device; `kind` is torch's name of its type."""
    return Cpu() if kind == "cpu" else Accelerator(kind, rank)


def _set_mmap_threshold(size: int) -> None:
    """Set from which size on a block is the system's. C libraries without mallopt stay as they are."""
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
ACCELERATORS_SIZE = 4096
"""Rows and columns of the product: some 30 ms of a core or of an accelerator in all."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def speed_test(job: Job, rank_device: RankDevice) -> float | None:
    """Return the seconds of some equal products, the fastest of several rounds; wall time of this rank alone.

    All ranks start together, so that devices that share power, cooling or cores do so here, too. It comes after the
    steps and after memory was read, so it changes no other figure. None on a device that has no room left for it.
    """
    size = SIZE.get(job.device.type, ACCELERATORS_SIZE)
    dtype = torch.float32 if job.device.type == "cpu" else _DTYPES[job.train.precision]
    ready = False
    with suppress(RuntimeError):  # out of memory, which must not cost a trial that ran to its end
        left = torch.ones(size, size, dtype=dtype, device=rank_device.device)
        out = torch.empty_like(left)
        torch.mm(left, left, out=out)
        ready = True
    best = float("inf")
    for _ in range(ROUNDS):
        rank_device.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PRODUCTS if ready else 0):
            torch.mm(left, left, out=out)
        rank_device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best if ready else None
