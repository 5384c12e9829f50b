"""The device of one rank: selecting it, synchronizing with it, its time (seconds) and memory (bytes), and a speed test.

Also joins the ranks of a job, and writes the files of a trial. On an accelerator torch's allocator and the driver count
the memory. On a CPU `device_used_bytes` is the rank's peak resident memory, and `peak_allocated_bytes` the peak growth
of anonymous memory since its process groups were created; the clock is the time of the rank's main thread.
"""

import ctypes
import gc
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_EXACT_THRESHOLD, _FAST_THRESHOLD = 64 << 10, 32 << 20
"""Sizes in bytes from which the C library maps each block separately (mallopt(3)), and returns it when it is freed, so
that resident memory is exact. Smaller blocks are reused, which is faster. The second one is the library's maximum."""


class Cpu:
    """The host's CPU as the device of a rank."""

    device = torch.device("cpu")
    needs_memory_step = True
    """Whether the peaks are measured in an additional, untimed step."""

    def __init__(self) -> None:
        _set_mmap_threshold(_EXACT_THRESHOLD)
        self._peak_allocated = self._peak = 0
        self.set_baseline()

    def synchronize(self) -> None:
        """Do nothing, because a CPU does not work in the background."""

    def clock(self) -> float:
        """Return the seconds of processor time that this rank's own work has taken so far."""
        return time.thread_time()

    def set_baseline(self) -> None:
        """Exclude the memory that is allocated so far, such as that of process groups, from the measurements.

        What is freed goes first, because memory that is returned later would count as negative.
        """
        gc.collect()
        _return_freed()
        self.start_peak()
        self._baseline = _anonymous_bytes()

    def reset_after_build(self) -> None:
        """Do nothing, because on a CPU the peak is in training, not while the model is built."""

    def allocated_bytes(self) -> int:
        """Return the bytes of anonymous memory above the baseline, after freed blocks are returned to the system."""
        _return_freed()
        return max(0, _anonymous_bytes() - self._baseline)

    def start_peak(self) -> None:
        """Reset the system's peak of resident memory, if the process has the permission to do so."""
        self._peak = max(self._peak, _status_bytes("VmHWM"))
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the peak bytes of anonymous memory above the baseline."""
        return max(0, _status_bytes("VmHWM") - _status_bytes("RssFile") - self._baseline)

    def end_memory_measurement(self, peak: int) -> None:
        """Store `peak` as the peak of the run, and stop measuring memory."""
        self._peak_allocated = peak
        _set_mmap_threshold(_FAST_THRESHOLD)

    def memory(self) -> dict[str, int | None]:
        """Return the peaks so far in bytes, by their names in the metrics."""
        return _memory(self._peak_allocated, None, max(self._peak, _status_bytes("VmHWM")))


class Accelerator:
    """An accelerator as the device of a rank. It has a torch module, such as torch.cuda."""

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
        """Return the host's clock after the device has finished its work. The device works only for this rank."""
        self._module.synchronize()
        return time.perf_counter()

    def set_baseline(self) -> None:
        """Do nothing, because the allocator only counts tensors."""

    def reset_after_build(self) -> None:
        """Return cached blocks to the driver, and restart the measurement of peaks."""
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
        """Return the allocator's peaks, and the memory that all processes currently use on the device, in bytes."""
        free, total = self._module.mem_get_info()
        return _memory(max(self._peak_allocated, self.peak_bytes()), self._module.max_memory_reserved(), total - free)


RankDevice: TypeAlias = Cpu | Accelerator


def open_device(kind: str, rank: int) -> RankDevice:
    """Return the device of the rank with the index `rank`. `kind` is torch's name of the device type."""
    return Cpu() if kind == "cpu" else Accelerator(kind, rank)


def _memory(allocated: int, reserved: int | None, used: int) -> dict[str, int | None]:
    return {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "device_used_bytes": used}


def _set_mmap_threshold(size: int) -> None:
    """Set the size from which the C library maps blocks separately, if the library has mallopt."""
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, size)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * size)


def _return_freed() -> None:
    """Return freed blocks to the system, if the C library can."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _anonymous_bytes() -> int:
    return _status_bytes("RssAnon") + _status_bytes("RssShmem")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


SIZE, PRODUCTS, ROUNDS = {"cpu": 256}, 8, 4
ACCELERATOR_SIZE = 4096
"""Rows and columns of the speed test's matrix product. The test takes about 30 ms on a core or an accelerator."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def speed_test(rank_device: RankDevice, precision: str) -> float | None:
    """Return the seconds of `PRODUCTS` matrix products in the fastest of `ROUNDS` rounds, or None if they do not fit.

    All ranks start together, because devices may share power or cores. Call it after `memory()`: it changes the peaks.
    """
    kind = rank_device.device.type
    size = SIZE.get(kind, ACCELERATOR_SIZE)
    dtype = torch.float32 if kind == "cpu" else _DTYPES[precision]
    is_ready = False
    with suppress(RuntimeError):  # running out of memory here must not fail a finished trial
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


TIMEOUT = timedelta(minutes=10)
"""If a collective takes longer, it has failed."""


def join(job: Any, number: int, listener: socket.socket | None) -> None:
    """Join the other ranks as rank `number`. `listener` is the rendezvous that the first host opened.

    The job of any engine has a `world_size`, its number of `nodes`, and the `backend` of its `device`.
    """
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) if job.nodes > 1 else None
    join_group(job.device.backend, number, job.world_size, listener, address)


def join_group(
    backend: str | None, number: int, size: int, listener: socket.socket | None, address: tuple[str, int] | None = None
) -> None:
    """Join a group of `size` processes as process `number`, at `address` or else at that of `listener`."""
    if address is None:
        assert listener
        address = listener.getsockname()
    if (backend or "").endswith("gloo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # by default gloo resolves the host name
    listen = os.dup(listener.fileno()) if number == 0 and listener else None
    store = dist.TCPStore(*address, size, is_master=number == 0, timeout=TIMEOUT, master_listen_fd=listen)
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=TIMEOUT)


def append_step(folder: Path, step: Mapping[str, object]) -> None:
    """Append a step to `steps.jsonl` as one line of JSON."""
    with (folder / "steps.jsonl").open("a", encoding="utf-8") as file:
        print(json.dumps(step), file=file)


def write_metrics(folder: Path, metrics: dict[str, Any]) -> None:
    """Write `metrics.json` atomically."""
    temporary = folder / ".metrics.json.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(metrics, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / "metrics.json")
