"""Simulation of a pipeline: each pass starts when its device is free and its input is available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Pass: TypeAlias = tuple[str, int, int]
"""Kind, part of the model, micro-batch. Kinds: F forward; B the gradient of the activations; W that of the weights; BW
both as one pass."""

Orders: TypeAlias = list[list[tuple[Pass, ...]]]
"""The steps of each device, in order. Passes of one step start and end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """The devices of the parts of a model, and the seconds of their passes.

    `devices[part]` is the device of a part; a copy of the model has `length` parts, a second copy follows the first.
    `seconds[kind][part]` are given for the kinds F, B and W. Two overlapping passes take `together[part]` of their sum.
    A message to another device delays its receiver by `latency` and its sender by `waits`, except in a step of two
    passes, which hides messages.
    """

    devices: Sequence[int]
    length: int
    seconds: Mapping[str, Sequence[float]]
    together: Sequence[float]
    latency: float = 0.0
    waits: float = 0.0

    def duration(self, step: tuple[Pass, ...]) -> float:
        """Return the seconds of a step without waiting."""
        if len(step) == 1:
            ((kind, part, _),) = step
            return sum(self.seconds[letter][part] for letter in kind)
        return sum(self.seconds[letter][part] * self.together[part] for kind, part, _ in step for letter in kind)

    def sends(self, one: Pass) -> bool:
        """Return whether the result of a pass goes to another device."""
        kind, part, _ = one
        place = part % self.length
        if kind == "W" or place == (self.length - 1 if kind == "F" else 0):
            return False
        return self.devices[part] != self.devices[part + 1 if kind == "F" else part - 1]

    def ready(self, one: Pass, end: Mapping[Pass, float]) -> float | None:
        """Return the time at which the input of a pass is available, or None if unknown yet. `end` lists BW as B."""
        kind, part, batch = one
        place, source = part % self.length, part
        if kind == "F":
            if place == 0:
                return 0.0
            source, needed = part - 1, "F"
        elif kind == "W":
            needed = "B"
        elif place == self.length - 1:
            needed = "F"
        else:
            source, needed = part + 1, "B"
        found = end.get((needed, source, batch))
        if found is None or self.devices[source] == self.devices[part]:
            return found
        return found + self.latency


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
    """Return the passes device by device, each in its order. Raises ValueError on a deadlock."""
    end: dict[Pass, float] = {}
    free, place = [0.0] * len(orders), [0] * len(orders)
    done: list[list[ExecutedPass]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for device, order in enumerate(orders):
            while place[device] < len(order):
                step = order[place[device]]
                start = free[device]
                for one in step:
                    ready = pipe.ready(one, end)
                    if ready is None:
                        break
                    start = max(start, ready)
                else:
                    over = start + pipe.duration(step)
                    free[device] = over + (pipe.waits if len(step) == 1 and pipe.sends(step[0]) else 0.0)
                    for number, (kind, part, batch) in enumerate(step):
                        end["B" if kind == "BW" else kind, part, batch] = free[device]
                        lane = 2 * number - 1 if len(step) > 1 else 0
                        done[device].append(ExecutedPass(device, kind, part, batch, start, over, lane))
                    place[device] += 1
                    left -= 1
                    continue
                break
        if left == before:
            raise ValueError("deadlock in the schedule")
    return [each for mine in done for each in mine]


def seconds_of(done: Sequence[ExecutedPass]) -> tuple[float, float]:
    """Return the end of the last pass, and the longest time from a device's first start to its last end."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for each in done:
        first[each.device] = min(first.get(each.device, each.start_s), each.start_s)
        last[each.device] = max(last.get(each.device, each.end_s), each.end_s)
    return max(last.values()), max(last[device] - start for device, start in first.items())
