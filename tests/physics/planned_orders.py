"""Orders of the schedules that their authors plan with the seconds of passes: ZB-1p, ZB-2p, ZB-V, V-Half and V-Min.

They check the formulas. The plans are made by the rules of the papers: forwards and backwards in a fixed order, and the
gradients of weights where a device waits or has no memory left. Symbols as in `flagcore.physics.pipelines`.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from statistics import median_high
from typing import TypeAlias

from flagcore.domain.prediction import Passes
from flagcore.physics import pipelines
from flagcore.physics.pipelines import (
    ExecutedPass,
    Orders,
    Pass,
    Pipe,
    number_microbatches,
    one_forward_one_backward,
    run,
    seconds_of,
)

PLANNED = ("zb-1p", "zb-2p", "zb-v", "v-half", "v-min")


def simulate(passes: Passes, microbatches: int) -> list[ExecutedPass]:
    """Return the passes of a step of any schedule, device by device in the order of time."""
    if passes.schedule not in PLANNED:
        return pipelines.simulate(passes, microbatches)
    pipe = pipelines.pipe_of(passes)
    return run(orders_of(passes, microbatches, pipe), pipe)


def orders_of(passes: Passes, m: int, pipe: Pipe) -> Orders:
    """Return the order of passes of each device; plans are made with the times of the median stage."""
    p, schedule, share = len(passes.forward_s), passes.schedule, passes.weight_share
    if schedule not in PLANNED:
        return pipelines.orders_of(passes, m)
    even = median_of(pipe)
    if schedule in ("zb-1p", "zb-2p"):
        limit = p if schedule == "zb-1p" else 2 * p
        return best(ahead(even, m, limit), even, limit, 1.0 if schedule == "zb-1p" else share)
    if schedule == "zb-v":
        return best([v_shaped(p, m)], even, p, share)
    half, limit = schedule == "v-half", (p + 2) // 2 if schedule == "v-half" else (p + 4) // 3
    tables = v_tables(p, m, half=half)
    drawn = [orders_of_tables(each) for each in (tables, compacted(tables, m))]
    without_weights = [[[step for step in order if step[0][0] != "W"] for order in each] for each in drawn]
    return shortest([*drawn, best(without_weights, even, limit, share)], even)


def v_shaped(p: int, m: int) -> Orders:
    """Return ZB-V (arXiv 2401.10241, section 6) without its W: as many forwards as memory for p micro-batches takes,
    then a backward and a forward in turn."""
    orders: Orders = []
    for r in range(p):
        near, far = r, 2 * p - 1 - r
        order_ = [("F", near)] * (2 * (p - r) - 1) + [("F", far), ("F", near)] * r + [("F", far), ("B", far)] * (p - r)
        order_ += [("F", near), ("B", near), ("F", far), ("B", far)] * m + [("B", near), ("B", far)] * m
        orders.append(number_microbatches(([one] for one in order_), {near: m, far: m}))
    return orders


WEIGHT_RULES = (0.0, 0.5, 1.0)
"""Shares of a W that a device has to be waiting for before it runs one."""


def ahead(pipe: Pipe, m: int, limit: int) -> list[Orders]:
    """Return forwards and backwards of ZB-1p and ZB-2p (arXiv 2401.10241), within `limit` micro-batches of memory.

    The forwards before the first backward last as long as that takes to come back, rounded down or up.
    """
    p, forward = len(pipe.devices), pipe.seconds["F"][0]
    turn = forward + pipe.seconds["B"][0] + 2.0 * pipe.latency

    def warm(whole: Callable[[float], int]) -> Callable[[int], int]:
        return lambda r: min(limit - r, 1 + whole(round((p - 1 - r) * turn / forward, 9)))

    return [one_forward_one_backward(p, m, warm(whole), kind="B") for whole in (math.floor, math.ceil)]


def best(choices: Sequence[Orders], pipe: Pipe, limit: float, share: float) -> Orders:
    """Return the shortest of some plans, as the published schedulers take the best of some rules.

    `choices` are orders of F and B, `limit` and `share` those of `with_weights`. The shortest has the shortest longest
    span of one device: these schedules need no synchronisation of all devices. Raises ValueError if none fits.
    """
    plans = [with_weights(orders, pipe, limit, share, least) for orders, least in product(choices, WEIGHT_RULES)]
    fitting = [plan for plan in plans if plan is not None]
    if not fitting:
        raise ValueError(f"no plan fits in the memory of {limit} micro-batches")
    return shortest(fitting, pipe)


def shortest(plans: Sequence[Orders], pipe: Pipe) -> Orders:
    """Return the plan whose longest span of one device is shortest: no synchronisation of all devices ends its step."""

    def duration(plan: Orders) -> tuple[float, float]:
        full, span = seconds_of(run(plan, pipe))
        return round(span, 9), round(full, 9)

    return min(plans, key=duration)


def with_weights(orders: Orders, pipe: Pipe, limit: float, share: float, least: float) -> Orders | None:
    """Return orders of F and B with W where a device waits for `least` of one, or has no memory for a forward.

    `limit` is in micro-batches of a whole device; a pass F takes one part, its B gives back all but `share`. None
    where the forwards and backwards do not fit in that.
    """
    unit = len(orders) / len(pipe.devices)
    end: dict[Pass, float] = {}
    free, held, place = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)
    waiting: list[list[Pass]] = [[] for _ in orders]
    filled: Orders = [[] for _ in orders]
    left = sum(map(len, orders))

    def do(device: int, one: Pass, start: float, gains: float) -> None:
        end[one] = free[device] = start + pipe.duration((one,))
        held[device] += gains * unit
        filled[device].append((one,))

    while left:
        for device, order in enumerate(orders):
            while place[device] < len(order):
                (one,) = order[place[device]]
                ready = pipe.ready(one, end)
                if ready is None:
                    break
                later = waiting[device]
                full = one[0] == "F" and held[device] + unit > limit + 1e-9
                while later and (full or ready - free[device] >= max(least * pipe.duration((later[0],)), 1e-12)):
                    do(device, later.pop(0), free[device], -share)
                    full = one[0] == "F" and held[device] + unit > limit + 1e-9
                if full:
                    return None
                do(device, one, max(ready, free[device]), 1.0 if one[0] == "F" else share - 1.0)
                if one[0] == "B":
                    later.append(("W", *one[1:]))
                place[device] += 1
                left -= 1
    return [order + [(one,) for one in rest] for order, rest in zip(filled, waiting, strict=True)]


def median_of(pipe: Pipe) -> Pipe:
    """Return a pipe all of whose parts are its median one: what a schedule is planned with, before it runs."""
    even = {kind: [median_high(each)] * len(each) for kind, each in pipe.seconds.items()}
    return Pipe(
        devices=pipe.devices,
        length=pipe.length,
        seconds=even,
        overlap_share=pipe.overlap_share,
        latency=pipe.latency + pipe.sender_delay,
    )


Table: TypeAlias = dict[int, Pass]
"""What one device does, by the unit of time."""


def v_tables(p: int, m: int, *, half: bool) -> list[Table]:
    """Return V-Half or V-Min (arXiv 2405.15362): a pattern in six units of time, again for each micro-batch, W between.

    The paper moves the pattern's second half back by some units where passes of two micro-batches would fall together.
    """
    tables = []
    for r in range(p):
        if half:
            gap = 3 if p % 2 == 0 else 0
            times = (2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2)
        else:
            gap = 2 if p % 3 == 0 else 0
            times = (r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1)
        parts = (("F", r), ("F", 2 * p - 1 - r), ("B", 2 * p - 1 - r), ("B", r))
        table: Table = {t + 6 * i: (*parts[k], i) for k, t in enumerate(times) for i in range(m)}
        waiting: list[Pass] = []
        for t in range(max(table) + 2 * m + 1):
            if t in table:
                waiting += [("W", *table[t][1:])] * (table[t][0] == "B")
            elif waiting:
                table[t] = waiting.pop(0)
        tables.append(table)
    return tables


def compacted(tables: list[Table], m: int) -> list[Table]:
    """Return the tables with the passes of a step's start and end moved into earlier units that are free.

    A pass stays behind its input, and behind that of the micro-batch before it; a device never holds more than the
    most that any held before. The start goes as far as the first micro-batch's last backward, the end begins at the
    last micro-batch's last forward through the devices in order.
    """
    tables = [dict(table) for table in tables]
    p, units = len(tables), max(max(table) for table in tables) + 1
    held = [list(accumulate(_grown(table[t][0]) if t in table else 0 for t in range(units))) for table in tables]
    maximum = max(max(each) for each in held)
    when = {one: t for table in tables for t, one in table.items()}
    steady = (when["B", 0, 0], max(when["F", part, m - 1] for part in range(p)))
    for t, device, one in sorted((t, device, one) for device, table in enumerate(tables) for t, one in table.items()):
        if steady[0] <= t <= steady[1]:
            continue
        kind, part, batch = one
        first = max(when.get(_input(one, 2 * p), -1), when.get((kind, part, batch - 1), -1)) + 1
        for earlier in range(first, t):
            grown = _grown(kind)
            if earlier in tables[device] or (grown > 0 and max(held[device][earlier:t]) + grown > maximum):
                continue
            for unit in range(earlier, t):
                held[device][unit] += grown
            tables[device][earlier] = tables[device].pop(t)
            when[one] = earlier
            break
    return tables


def orders_of_tables(tables: list[Table]) -> Orders:
    """Return what each device does, in order."""
    return [[(table[t],) for t in sorted(table)] for table in tables]


def _grown(kind: str) -> int:
    """Return how many parts of a micro-batch's activations a device holds more after a pass, as the pattern counts."""
    return {"F": 1, "W": -1}.get(kind, 0)


def _input(one: Pass, parts: int) -> Pass:
    """Return the pass that gives a pass its input; one that does not exist for the first forward."""
    kind, part, batch = one
    if kind == "F":
        return "F", part - 1, batch
    if kind == "W":
        return "B", part, batch
    return ("B", part + 1, batch) if part < parts - 1 else ("F", part, batch)
