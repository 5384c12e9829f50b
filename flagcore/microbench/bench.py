"""Times calls one after another, synchronized with the processes on the other devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SAMPLE_SECONDS = 1e-3
"""Minimum seconds of a sample of calls, so that timer overhead is negligible."""

MOST_SAMPLES, LEAST_SAMPLES = 25, 3

QUIET = 0.1
"""The quantile of samples that is taken as a call's time: disturbances only make it slower."""

QUEUE = 200
"""Maximum calls by which the host may be ahead of an accelerator."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: a low quantile or the median of `repeats` samples, and the spread between quartiles."""

    seconds: float
    spread: float
    repeats: int


class Bench:
    """Times calls on one device. All processes must make the same timings in the same order."""

    def __init__(self, kind: str, number: int, several: bool) -> None:
        self.cpu, self._several = kind == "cpu", several
        self._module: Any = getattr(torch, kind)
        self._filler: torch.Tensor | None = None
        if not self.cpu:
            self._module.set_device(number)
        self.device = torch.device(kind) if self.cpu else torch.device(kind, number)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.cpu:
            self._module.synchronize()

    @staticmethod
    def clock() -> float:
        """Return the host's clock."""
        return time.perf_counter()

    def agree(self, value: float) -> float:
        """Return the largest value of all processes."""
        if not self._several:
            return value
        shared = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.item())

    def time(self, call: Callable[[], object], seconds: float, *, alone: bool = True) -> Timing:
        """Return the time of `call` on the slowest device, measured for about `seconds`.

        On an accelerator it is the time of the device, not of the host. A kernel `alone` on one core, without other
        processes, is measured in processor time, so other load does not count.
        """
        call()
        once = self.agree(self._host(call, 1))
        if once < SAMPLE_SECONDS:
            calls = max(1, min(QUEUE, int(SAMPLE_SECONDS / once)))
            once = self.agree(self._host(call, calls) / calls)
        calls = max(1, min(QUEUE, int(SAMPLE_SECONDS / max(once, 1e-7))))
        samples = int(max(LEAST_SAMPLES, min(MOST_SAMPLES, seconds / (once * calls))))
        self.agree(0.0)
        sample = self._device
        if self.cpu:
            sample = self._core if alone and torch.get_num_threads() == 1 else self._host
        found = sorted(sample(call, calls) / calls for _ in range(samples))
        middle, spread = found[len(found) // 2], found[(3 * len(found)) // 4] - found[len(found) // 4]
        return Timing(self.agree(found[int(QUIET * len(found))]), spread / middle, samples)

    def host_time(self, call: Callable[[], object], calls: int) -> Timing:
        """Return the host's processor time to launch `call`; the device may still be busy."""
        call()
        found = []
        for _ in range(LEAST_SAMPLES):
            self.synchronize()
            start = time.process_time()
            for _ in range(calls):
                call()
            found.append((time.process_time() - start) / calls)
        self.synchronize()
        found.sort()
        return Timing(found[1], (found[-1] - found[0]) / found[1], LEAST_SAMPLES)

    def _core(self, call: Callable[[], object], calls: int) -> float:
        """Return the processor time of `calls` calls."""
        start = time.process_time()
        for _ in range(calls):
            call()
        return time.process_time() - start

    def _host(self, call: Callable[[], object], calls: int) -> float:
        """Return the seconds of `calls` calls by the host's clock."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def _device(self, call: Callable[[], object], calls: int) -> float:
        """Return the seconds of `calls` calls by the device's clock, with the host ahead of it."""
        if not hasattr(self._module, "Event"):
            return self._host(call, calls)
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._host_ahead():
            start.record()
            for _ in range(calls):
                call()
            end.record()
        self.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    @contextlib.contextmanager
    def _host_ahead(self) -> Iterator[None]:
        """Keep the device busy for some milliseconds, while the host launches the timed calls."""
        if self._filler is None:
            self._filler = torch.zeros(64 << 20, dtype=torch.uint8, device=self.device)
        for _ in range(QUEUE):
            self._filler.bitwise_not_()
        yield
