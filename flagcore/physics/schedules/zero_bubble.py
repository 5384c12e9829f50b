"""Orders that are planned with the seconds of passes: where the gradients of weights go (ZB-1p, ZB-2p, ZB-V, V-Half,
V-Min)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median_high

from flagcore.physics.schedules.execution import Orders, Pass, Pipe, run, seconds_of
from flagcore.physics.schedules.orders import one_forward_one_backward

LEAST = (0.0, 0.5, 1.0)
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
    plans = [with_weights(orders, pipe, limit, share, least) for orders, least in product(choices, LEAST)]
    fitting = [plan for plan in plans if plan is not None]
    if not fitting:
        raise ValueError(f"no plan fits in the memory of {limit} micro-batches")
    return shortest(fitting, pipe)


def shortest(plans: Sequence[Orders], pipe: Pipe) -> Orders:
    """Return the plan whose longest span of one device is shortest: no synchronisation of all devices ends its step."""

    def lasts(plan: Orders) -> tuple[float, float]:
        whole, span = seconds_of(run(plan, pipe))
        return round(span, 9), round(whole, 9)

    return min(plans, key=lasts)


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
        end[one] = free[device] = start + pipe.lasts((one,))
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
                while later and (full or ready - free[device] >= max(least * pipe.lasts((later[0],)), 1e-12)):
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
        together=pipe.together,
        latency=pipe.latency + pipe.waits,
    )
