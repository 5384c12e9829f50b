"""Simulates a pipeline. Each pass starts when its device is free and its input is available."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Pass: TypeAlias = tuple[str, int, int]
"""The kind, the part of the model and the micro-batch of a pass. Kinds: F is the forward pass, B computes the gradients
of the activations, W those of the weights, and BW both."""

Orders: TypeAlias = list[list[tuple[Pass, ...]]]
"""The steps of each device, in order. The passes of a step overlap: they start and end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """The devices of the parts of a model, and the times of their passes.

    `devices[part]` is the device of a part. A copy of the model has `length` parts; the parts of a second copy follow
    those of the first. `seconds[kind][part]` is the time of a pass of the kinds F, B and W. Overlapping passes take
    `overlap_share[part]` of the sum of their times. A message delays its receiver by `latency` and its sender by
    `sender_delay`. Steps with overlapping passes hide their messages.
    """

    devices: Sequence[int]
    length: int
    seconds: Mapping[str, Sequence[float]]
    overlap_share: Sequence[float]
    latency: float = 0.0
    sender_delay: float = 0.0

    def duration(self, step: tuple[Pass, ...]) -> float:
        """Return the seconds of a step."""
        if len(step) == 1:
            ((kind, part, _),) = step
            return sum(self.seconds[letter][part] for letter in kind)
        return sum(self.seconds[letter][part] * self.overlap_share[part] for kind, part, _ in step for letter in kind)

    def sends(self, pass_: Pass) -> bool:
        """Return whether a pass sends its result to another device."""
        kind, part, _ = pass_
        position = part % self.length
        if kind == "W" or position == (self.length - 1 if kind == "F" else 0):
            return False
        return self.devices[part] != self.devices[part + 1 if kind == "F" else part - 1]

    def ready(self, pass_: Pass, ends: Mapping[Pass, float]) -> float | None:
        """Return the time at which the input of a pass is available, or None if it is not known yet.

        `ends` has the end times of passes; BW passes are listed as B.
        """
        kind, part, batch = pass_
        position, source = part % self.length, part
        if kind == "F":
            if position == 0:
                return 0.0
            source, source_kind = part - 1, "F"
        elif kind == "W":
            source_kind = "B"
        elif position == self.length - 1:
            source_kind = "F"
        else:
            source, source_kind = part + 1, "B"
        end = ends.get((source_kind, source, batch))
        if end is None or self.devices[source] == self.devices[part]:
            return end
        return end + self.latency


@dataclass(frozen=True, slots=True)
class ExecutedPass:
    """A pass with its times. `lane` is -1 or 1 for the first or second of two overlapping passes, else 0."""

    device: int
    kind: str
    part: int
    microbatch: int
    start_s: float
    end_s: float
    lane: int = 0


def run(orders: Orders, pipe: Pipe) -> list[ExecutedPass]:
    """Return the passes of all devices, ordered by device and time. Raises ValueError on a deadlock."""
    ends: dict[Pass, float] = {}
    free_at, next_step = [0.0] * len(orders), [0] * len(orders)
    executed: list[list[ExecutedPass]] = [[] for _ in orders]
    remaining = sum(map(len, orders))
    while remaining:
        before = remaining
        for device, order in enumerate(orders):
            while next_step[device] < len(order):
                step = order[next_step[device]]
                inputs = [pipe.ready(pass_, ends) for pass_ in step]
                start = max(free_at[device], *(math.inf if ready is None else ready for ready in inputs))
                if start == math.inf:
                    break
                end = start + pipe.duration(step)
                free_at[device] = end + (pipe.sender_delay if len(step) == 1 and pipe.sends(step[0]) else 0.0)
                for number, (kind, part, batch) in enumerate(step):
                    ends["B" if kind == "BW" else kind, part, batch] = free_at[device]
                    lane = 2 * number - 1 if len(step) > 1 else 0
                    executed[device].append(ExecutedPass(device, kind, part, batch, start, end, lane))
                next_step[device] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("deadlock in the schedule")
    return [each for passes in executed for each in passes]


def seconds_of(executed: Sequence[ExecutedPass]) -> tuple[float, float]:
    """Return the end of the last pass, and the longest time from the first start to the last end on one device."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in executed:
        starts[each.device] = min(starts.get(each.device, each.start_s), each.start_s)
        ends[each.device] = max(ends.get(each.device, each.end_s), each.end_s)
    return max(ends.values()), max(ends[device] - start for device, start in starts.items())
