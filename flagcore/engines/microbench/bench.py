"""Measures the times of calls, synchronized with the processes on the other devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SAMPLE_SECONDS = 1e-3
"""The minimum duration of a sample of calls, so that the overhead of the timer is negligible."""

MAX_SAMPLES, MIN_SAMPLES = 25, 3

TIME_QUANTILE = 0.1
"""The quantile of the samples that is used as the time of a call, because disturbances only make calls slower."""

MAX_QUEUED_CALLS = 200
"""The maximum number of calls by which the host may be ahead of an accelerator."""


@dataclass(frozen=True)
class Timing:
    """The seconds of one call, from `repeats` samples, and the relative spread of the samples."""

    seconds: float
    spread: float
    repeats: int


class Bench:
    """Measures calls on one device. All processes must measure the same calls in the same order."""

    def __init__(self, kind: str, number: int, is_distributed: bool) -> None:
        self.cpu, self._is_distributed = kind == "cpu", is_distributed
        self._module: Any = getattr(torch, kind)
        self._filler: torch.Tensor | None = None
        if not self.cpu:
            self._module.set_device(number)
        self.device = torch.device(kind) if self.cpu else torch.device(kind, number)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.cpu:
            self._module.synchronize()

    def agree(self, value: float) -> float:
        """Return the maximum of `value` over all processes."""
        if not self._is_distributed:
            return value
        shared = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.item())

    def time(self, call: Callable[[], object], seconds: float, *, alone: bool = True) -> Timing:
        """Return the time of `call` on the slowest device, measured for about `seconds`.

        On an accelerator, it is the time of the device. On a CPU with one thread, a call that runs `alone` is measured
        in processor time, which does not depend on other load.
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
        """Return the host's processor time to launch `call`, without waiting for the device."""
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
        """Return the processor time of `calls` calls."""
        start = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - start

    def seconds_of(self, call: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds of `calls` calls on the host's clock."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def _device(self, call: Callable[[], object], calls: int) -> float:
        """Return the seconds of `calls` calls on the device's clock, with the host ahead of the device."""
        if not hasattr(self._module, "Event"):
            return self.seconds_of(call, calls)
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        if self._filler is None:
            self._filler = torch.zeros(64 << 20, dtype=torch.uint8, device=self.device)
        for _ in range(MAX_QUEUED_CALLS):  # keeps the device busy while the host launches the measured calls
            self._filler.bitwise_not_()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) * 1e-3
