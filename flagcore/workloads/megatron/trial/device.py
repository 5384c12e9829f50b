"""The device of one rank: choose it, wait for it, and say how much memory was used. All sizes in bytes.

On an accelerator the numbers come from torch's allocator and the driver. On a CPU `device_used_bytes` is the
rank's peak resident memory, and `peak_allocated_bytes` that peak less what was resident when the rank
started (the shared libraries); there is no reserved memory to speak of.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Memory:
    """What one rank used at its worst moment."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    device_used_bytes: int


class RankDevice(Protocol):
    """What the training loop needs of a device."""

    device: torch.device

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    def built(self) -> None:
        """Forget the memory that building the model took and training does not."""

    def memory(self) -> Memory:
        """Return the peaks so far."""


class Cpu:
    """The host itself."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # where it is not allowed the peak is the parent's or more
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._at_start = _status_bytes("VmRSS")

    def synchronize(self) -> None:
        """Nothing runs in the background."""

    def built(self) -> None:
        """The peak comes in training; nothing to forget."""

    def memory(self) -> Memory:
        """Return the peak resident memory of this process."""
        peak = _status_bytes("VmHWM")
        return Memory(max(0, peak - self._at_start), None, peak)


class Accelerator:
    """A device that torch knows as a module of its own: torch.cuda and its like."""

    def __init__(self, kind: str, rank: int) -> None:
        self._module: Any = getattr(torch, kind)
        local_rank = int(os.environ.get("LOCAL_RANK", rank % self._module.device_count()))
        self._module.set_device(local_rank)
        self.device = torch.device(kind, local_rank)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._module.synchronize()

    def built(self) -> None:
        """Return cached blocks to the driver and restart the peaks."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()

    def memory(self) -> Memory:
        """Return the allocator's peaks, and what the driver calls used now (by any process)."""
        free, total = self._module.mem_get_info()
        return Memory(self._module.max_memory_allocated(), self._module.max_memory_reserved(), total - free)


def open_device(kind: str, rank: int) -> RankDevice:
    """Take this rank's device: torch's name for the kind, the launcher's LOCAL_RANK for which."""
    return Cpu() if kind == "cpu" else Accelerator(kind, rank)


def _status_bytes(field: str) -> int:
    """Read one field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
