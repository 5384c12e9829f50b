"""An event-driven simulation of pipeline schedules, pass by pass: what the closed forms are checked against.

A pass is (kind, part, micro-batch). Kinds: F forward; B gradient of the activations; W gradient of the weights; BW
both at once. `devices[part]` is where a part of the model lies, `seconds[kind][part]` what its pass takes. A step of
a device is a tuple of passes that start and end together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Pass = tuple[str, int, int]
Orders = list[list[tuple[Pass, ...]]]
Seconds = dict[str, list[float]]
FOLDED = ("zb-v", "v-half", "v-min", "dualpipev")
"""Schedules whose device r holds the parts r and 2p - 1 - r."""


def simulate(
    orders: Orders,
    devices: Sequence[int],
    seconds: Seconds,
    latency: float = 0.0,
    together: float = 1.0,
    length: int | None = None,
) -> tuple[float, float]:
    """Return when all are done, and the longest time between a device's first start and its last end.

    Two passes of one step take `together` of their sum. `length` is the parts of a copy of the model (default all).
    """
    end: dict[Pass, float] = {}
    free, first, place = [0.0] * len(orders), [math.inf] * len(orders), [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for device, order in enumerate(orders):
            while place[device] < len(order):
                step = order[place[device]]
                ready = [arrival(one, device, devices, end, latency, length) for one in step]
                if math.inf in ready:
                    break
                start = max(free[device], *ready)
                taken = sum(lasts(seconds, kind, part) for kind, part, _ in step)
                done = start + taken * (together if len(step) > 1 else 1.0)
                end.update({("B" if kind == "BW" else kind, part, batch): done for kind, part, batch in step})
                free[device], first[device] = done, min(first[device], start)
                place[device] += 1
                left -= 1
        assert left < before, "the orders wait for each other"
    return max(free), max(last - start for last, start in zip(free, first, strict=True))


def arrival(
    one: Pass, device: int, devices: Sequence[int], end: dict[Pass, float], latency: float, length: int | None = None
) -> float:
    """Return when the input of a pass is there; infinity: not known yet."""
    kind, part, batch = one
    length = length or len(devices)
    if kind == "F":
        needs, source = ("F", part - 1, batch), devices[part - 1]
        if part % length == 0:
            return 0.0
    elif kind == "W" or part % length == length - 1:
        needs, source = ("B" if kind == "W" else "F", part, batch), device
    else:
        needs, source = ("B", part + 1, batch), devices[part + 1]
    return end.get(needs, math.inf) + (latency if source != device else 0.0)


def lasts(seconds: Seconds, kind: str, part: int) -> float:
    return sum(seconds[letter][part] for letter in kind)


def one_forward_one_backward(p: int, m: int, warm: Callable[[int], int] | None = None, kind: str = "BW") -> Orders:
    """Stage r runs `warm` forwards (1F1B: p - r), then backward and forward in turn."""
    orders: Orders = []
    for r in range(p):
        ahead = min(warm(r) if warm else p - r, m)
        order = [("F", r, i) for i in range(ahead)]
        for i in range(m):
            order += [(kind, r, i)] + [("F", r, i + ahead)] * (i + ahead < m)
        orders.append([(one,) for one in order])
    return orders


def interleaved(p: int, m: int, v: int) -> Orders:
    """megatron-core's table: p micro-batches on one virtual stage, then on the next; part = chunk * p + stage."""
    table = [(i, c) for a in range(0, m, p) for c in range(v) for i in range(a, min(a + p, m))]
    orders: Orders = []
    for r in range(p):
        forwards = [("F", c * p + r, i) for i, c in table]
        backwards = [("BW", (v - 1 - c) * p + r, i) for i, c in table]
        warm = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        order = forwards[:warm]
        for forward, backward in itertools.zip_longest(forwards[warm:], backwards):
            order += [forward, backward] if forward else [backward]
        orders.append([(one,) for one in order])
    return orders


def deferring(p: int, m: int, *, twice: bool) -> Orders:
    """ZB-H1 (`twice`: ZB-H2) as drawn in arXiv 2401.10241: stage r lets r (2r) gradients of weights wait."""
    orders = one_forward_one_backward(p, m, (lambda r: 2 * (p - r) - 1) if twice else None, kind="B")
    for r, order in enumerate(orders):
        allowed, filled, waiting = (2 * r if twice else r), [], list[int]()
        for ((kind, _, i),) in order:
            filled.append(((kind, r, i),))
            if kind == "B":
                waiting.append(i)
                if len(waiting) > allowed:
                    filled.append((("W", r, waiting.pop(0)),))
        orders[r] = filled + [(("W", r, i),) for i in waiting]
    return orders


def v_shaped(p: int, m: int) -> Orders:
    """ZB-V without its W: as many forwards as memory for p micro-batches takes, then backward and forward in turn."""
    orders: Orders = []
    for r in range(p):
        near, far = r, 2 * p - 1 - r
        wanted = [("F", near)] * (2 * (p - r) - 1) + [("F", far), ("F", near)] * r + [("F", far), ("B", far)] * (p - r)
        wanted += [("F", near), ("B", near), ("F", far), ("B", far)] * m + [("B", near), ("B", far)] * m
        orders.append([(one,) for one in numbered(wanted, m)])
    return orders


def numbered(wanted: Sequence[tuple[str, int]], m: int) -> list[Pass]:
    """Return the passes with their micro-batches; those beyond the last one fall away."""
    count: dict[tuple[str, int], int] = {}
    order = []
    for kind, part in wanted:
        i = count.get((kind, part), 0)
        count[kind, part] = i + 1
        if i < m:
            order.append((kind, part, i))
    return order


def v_pattern(p: int, m: int, *, half: bool) -> Orders:
    """V-Half and V-Min (arXiv 2405.15362): one pattern in six units of time, again for each micro-batch, W between.

    The paper moves its second half back by some units where passes of two micro-batches would fall together, and
    squeezes the start and the end afterwards; that squeezing is left out here.
    """
    orders: Orders = []
    for r in range(p):
        if half:
            gap = 3 if p % 2 == 0 else 0
            times = (2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2)
        else:
            gap = 2 if p % 3 == 0 else 0
            times = (r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1)
        parts = (("F", r), ("F", 2 * p - 1 - r), ("B", 2 * p - 1 - r), ("B", r))
        timed = {t + 6 * i: (*parts[k], i) for k, t in enumerate(times) for i in range(m)}
        assert len(timed) == 4 * m, "two passes at one time"
        order, waiting = [], list[Pass]()
        for t in range(max(timed) + 2 * m + 1):
            if t in timed:
                order.append(timed[t])
                waiting += [("W", *timed[t][1:])] * (timed[t][0] == "B")
            elif waiting:
                order.append(waiting.pop(0))
        orders.append([(one,) for one in order])
    return orders


def dualpipe_v(p: int, m: int) -> Orders:
    return [dual_order(p, m, r, r, 2 * p - 1 - r) for r in range(p)]


def dualpipe(p: int, m: int) -> Orders:
    """DualPipe: two copies, the second one (parts p to 2p - 1) the other way round, half of the micro-batches each."""
    orders: Orders = []
    for r in range(p):
        near, far = (r, 2 * p - 1 - r) if r < p // 2 else (2 * p - 1 - r, r)
        orders.append(dual_order(p // 2, m // 2, min(r, p - 1 - r), near, far))
    return orders


def dual_order(p: int, m: int, r: int, near: int, far: int) -> list[tuple[Pass, ...]]:
    """The eight phases of DualPipe on device r; a step of two passes is a forward and a backward that run together."""
    rest, alone = p - r - 1, r + 1
    steps: list[tuple[tuple[str, int], ...]] = [(("F", near),)] * (2 * rest)
    steps += [(("F", near),), (("F", far),)] * alone
    steps += [(("B", far),), (("W", far),), (("F", far),)] * rest
    middle = [(("F", near), ("BW", far)), (("F", far), ("BW", near))] * (m - 2 * p + r + 1)
    if rest == 0:
        middle[:1] = [(("F", near),), (("BW", far),)]
    steps += middle + [(("BW", far),), (("F", far), ("BW", near))] * rest
    closing = [("BW", far), ("BW", near)] * alone
    split = 2 * (alone // 2) + (1 if r % 2 == 0 else 0)
    steps += [((("BW" if k < split else "B"), part),) for k, (_, part) in enumerate(closing)]
    waiting = [("W", part) for _, part in closing[split:]]
    for _ in range(rest):
        steps += [(waiting.pop(0),), (("B", near),)]
        waiting.append(("W", near))
    steps += [(one,) for one in waiting]
    counted: dict[tuple[str, int], int] = {}
    order = []
    for step in steps:
        passes = []
        for kind, part in step:
            done = [counted.get((letter, part), 0) for letter in kind]
            counted.update({(letter, part): i + 1 for letter, i in zip(kind, done, strict=True)})
            passes.append((kind, part, done[0]))
        order.append(tuple(passes))
    return order


def with_weights(
    orders: Orders, devices: Sequence[int], seconds: Seconds, latency: float, limit: float, share: float, least: float
) -> Orders:
    """Put the gradients of weights where a device waits for `least` of one, or has no memory for a forward.

    `limit` is in micro-batches of a whole device; a pass F takes one part, its B gives back all but `share`.
    Raises MemoryError where the order of forwards and backwards does not fit.
    """
    unit = len(orders) / len(devices)
    end: dict[Pass, float] = {}
    free, held, place = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)
    waiting: list[list[Pass]] = [[] for _ in orders]
    filled: Orders = [[] for _ in orders]

    def run(device: int, one: Pass, start: float, gains: float) -> None:
        end[one] = free[device] = start + lasts(seconds, one[0], one[1])
        held[device] += gains * unit
        filled[device].append((one,))

    for _ in range(sum(map(len, orders))):
        open_ = [d for d in range(len(orders)) if place[d] < len(orders[d])]
        for device in sorted(open_, key=lambda d: free[d]):
            ((kind, part, batch),) = orders[device][place[device]]
            ready = arrival((kind, part, batch), device, devices, end, latency)
            if ready == math.inf:
                continue
            while waiting[device] and (
                (kind == "F" and held[device] + unit > limit + 1e-9)
                or ready - free[device] >= max(least * seconds["W"][waiting[device][0][1]], 1e-12)
            ):
                run(device, waiting[device].pop(0), free[device], -share)
            if kind == "F" and held[device] + unit > limit + 1e-9:
                raise MemoryError
            run(device, (kind, part, batch), max(ready, free[device]), 1.0 if kind == "F" else share - 1.0)
            if kind == "B":
                waiting[device].append(("W", part, batch))
            place[device] += 1
            break
    return [order + [(one,) for one in rest] for order, rest in zip(filled, waiting, strict=True)]


def planned(
    choices: Sequence[Orders],
    devices: Sequence[int],
    seconds: Seconds,
    latency: float,
    limit: float,
    share: float,
) -> Orders:
    """Return the best of some plans, as the published schedulers take the best of some rules.

    Best is the shortest longest span of one device: these schedules need no synchronisation of all devices.
    """
    best, found = (math.inf, math.inf), None
    for orders, least in itertools.product(choices, (0.0, 0.5, 1.0)):
        try:
            plan = with_weights(orders, devices, seconds, latency, limit, share, least)
        except MemoryError:
            continue
        whole, span = (round(x, 9) for x in simulate(plan, devices, seconds, latency))
        if (span, whole) < best:
            best, found = (span, whole), plan
    assert found is not None, "no plan fits"
    return found


def devices_of(schedule: str, p: int, v: int = 1) -> list[int]:
    """Return the device of each part of the model."""
    return [*range(p), *reversed(range(p))] if schedule in (*FOLDED, "dualpipe") else [*range(p)] * v


def orders_of(
    schedule: str, p: int, m: int, seconds: Seconds, latency: float = 0.0, share: float = 0.4, v: int = 1
) -> Orders:
    """Return each device's steps; `seconds` and `share` are what an automatic schedule is planned with."""
    devices = devices_of(schedule, p, v)
    if schedule in ("1f1b", "gpipe"):
        return one_forward_one_backward(p, m, (lambda r: m) if schedule == "gpipe" else None)
    if schedule == "interleaved":
        return interleaved(p, m, v)
    if schedule in ("zb-h1", "zb-h2"):
        return deferring(p, m, twice=schedule == "zb-h2")
    if schedule == "dualpipev":
        return dualpipe_v(p, m)
    if schedule == "dualpipe":
        return dualpipe(p, m)
    if schedule in ("v-half", "v-min"):
        drawn = v_pattern(p, m, half=schedule == "v-half")
        bare = [[step for step in order if step[0][0] != "W"] for order in drawn]
        filled = planned(
            [bare], devices, seconds, latency, (p + 2) // 2 if schedule == "v-half" else (p + 4) // 3, share
        )
        return min(drawn, filled, key=lambda some: simulate(some, devices, seconds, latency))
    if schedule == "zb-v":
        return planned([v_shaped(p, m)], devices, seconds, latency, p, share)
    limit, turn = {"zb-1p": p, "zb-2p": 2 * p}[schedule], (seconds["F"][0] + seconds["B"][0] + 2.0 * latency)

    def ahead(r: int, whole: Callable[[float], int]) -> int:
        return min(limit - r, 1 + whole(round((p - 1 - r) * turn / seconds["F"][0], 9)))

    choices = [
        one_forward_one_backward(p, m, lambda r, to=to: ahead(r, to), kind="B") for to in (math.floor, math.ceil)
    ]
    return planned(choices, devices, seconds, latency, limit, share)


def held(order: list[tuple[Pass, ...]], parts: int) -> tuple[float, float]:
    """Return the most micro-batches before their backward, and how many more wait for W at the worst moment."""
    forward = waiting = 0
    most, worst = 0, (0, 0)
    for step in order:
        for kind, _, _ in sorted(step, reverse=True):  # F before BW: both live while they run together
            forward += (kind == "F") - (kind in ("B", "BW"))
            waiting += (kind == "B") - (kind == "W")
            most = max(most, forward)
            worst = max(worst, (forward + waiting, waiting))
    return most / parts, (worst[0] - most) / parts
