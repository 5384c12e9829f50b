"""When each pass of a pipeline runs: one-forward-one-backward and its relatives, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from flagcore.domain.passes import Passes

DRAWN = ("gpipe", "1f1b", "interleaved")
"""Schedules whose order is the same for all times of passes. `interleaved` with one virtual stage is 1F1B."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of one micro-batch through the virtual stage `part`, which lies on `stage`."""

    stage: int
    part: int
    microbatch: int
    backward: bool
    start_s: float
    end_s: float


def timeline(passes: Passes, microbatches: int) -> list[Pass]:
    """Return the passes of a step of so many micro-batches, a stage after another, each in the order of its time.

    Orders are megatron-core's: 1F1B (Narayanan et al. 2021, arXiv 2104.04473), interleaved in groups of as many
    micro-batches as there are stages; with `gpipe` all forwards come first (arXiv 1811.06965). A pass starts when its
    stage is free and its input is there. Raises ValueError for another schedule.
    """
    if passes.schedule not in DRAWN:
        raise ValueError(f"the order of {passes.schedule} depends on its times")
    count, virtual = len(passes.forward_s), passes.virtual
    orders = [_order(passes.schedule, stage, count, microbatches, virtual) for stage in range(count)]
    waits, late = (passes.send_s, 0.0) if passes.sender_waits else (0.0, passes.send_s)
    end: dict[tuple[int, int, bool], float] = {}
    free, place, done = [0.0] * count, [0] * count, list[Pass]()
    while any(place[stage] < len(orders[stage]) for stage in range(count)):
        before = len(done)
        for stage in range(count):
            while place[stage] < len(orders[stage]):
                part, microbatch, backward = orders[stage][place[stage]]
                needs = _needs(part, microbatch, backward, count * virtual)
                if needs is not None and needs not in end:
                    break
                apart = needs is not None and needs[0] != part and count > 1
                ready = 0.0 if needs is None else end[needs] + (late if apart else 0.0)
                start = max(free[stage], ready)
                own = passes.backward_s if backward else passes.forward_s
                sends = part > 0 if backward else part < count * virtual - 1
                free[stage] = start + own[stage] / virtual + (waits if sends else 0.0)
                end[part, microbatch, backward] = free[stage]
                done.append(Pass(stage, part, microbatch, backward, start, start + own[stage] / virtual))
                place[stage] += 1
        if len(done) == before:
            raise ValueError("the passes wait for each other")
    return sorted(done, key=lambda each: (each.stage, each.start_s))


def fewest(passes: Passes, most: int) -> int | None:
    """Return how many of a step's micro-batches are enough to show its start, its middle and its end.

    None where even so the timeline would have more than `most` passes.
    """
    count = len(passes.forward_s)
    wanted = min(passes.microbatches, max(2 * count, 8))
    if passes.virtual > 1:
        wanted = min(passes.microbatches, -(-wanted // count) * count)
    return wanted if 2 * count * passes.virtual * wanted <= most else None


def _order(schedule: str, stage: int, count: int, microbatches: int, virtual: int) -> list[tuple[int, int, bool]]:
    """Return part, micro-batch and direction of the passes of one stage."""
    table = [
        (chunk, each)
        for first in range(0, microbatches, count)
        for chunk in range(virtual)
        for each in range(first, min(first + count, microbatches))
    ]
    forwards = [(chunk * count + stage, each, False) for chunk, each in table]
    backwards = [((virtual - 1 - chunk) * count + stage, each, True) for chunk, each in table]
    if schedule == "gpipe":
        return forwards + backwards
    ahead = 2 * (count - 1 - stage) + (virtual - 1) * count if virtual > 1 else count - 1 - stage
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip_longest(forwards[ahead:], backwards):
        order += [forward, backward] if forward else [backward]
    return order


def _needs(part: int, microbatch: int, backward: bool, parts: int) -> tuple[int, int, bool] | None:
    """Return the pass that gives a pass its input; None for the first forward."""
    if not backward:
        return (part - 1, microbatch, False) if part else None
    return (part + 1, microbatch, True) if part < parts - 1 else (part, microbatch, False)
