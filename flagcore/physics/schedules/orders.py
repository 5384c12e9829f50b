"""Orders of passes on each device, for schedules that do not depend on the times of passes.

Symbols: p devices, m micro-batches, r a device. Device r holds part r; with v virtual stages also r + p and so on; in
DualPipeV also part 2p - 1 - r; in DualPipe a part of a second copy that runs in reverse. Orders are valid for any m: a
schedule that is defined for more micro-batches skips the missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

from flagcore.physics.schedules.execution import Orders, Pass


def one_forward_one_backward(p: int, m: int, warm: Callable[[int], int] | None = None, kind: str = "BW") -> Orders:
    """Return 1F1B (arXiv 2104.04473): device r runs `warm` forwards, p - r by default, then a backward and a forward
    in turn. With as many forwards as micro-batches it is GPipe (arXiv 1811.06965)."""
    orders: Orders = []
    for r in range(p):
        ahead = min(warm(r) if warm else p - r, m)
        order = [("F", r, i) for i in range(ahead)]
        for i in range(m):
            order += [(kind, r, i)] + [("F", r, i + ahead)] * (i + ahead < m)
        orders.append([(one,) for one in order])
    return orders


def interleaved(p: int, m: int, v: int) -> Orders:
    """Return interleaved 1F1B (arXiv 2104.04473): p micro-batches on one virtual stage, then on the next."""
    table = [(i, c) for a in range(0, m, p) for c in range(v) for i in range(a, min(a + p, m))]
    orders: Orders = []
    for r in range(p):
        forwards = [("F", c * p + r, i) for i, c in table]
        backwards = [("BW", (v - 1 - c) * p + r, i) for i, c in table]
        warm = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        order: list[Pass] = forwards[:warm]
        for forward, backward in zip_longest(forwards[warm:], backwards):
            order += [forward, backward] if forward else [backward]
        orders.append([(one,) for one in order])
    return orders


def deferring(p: int, m: int, *, twice: bool) -> Orders:
    """Return ZB-H1 (`twice`: ZB-H2) as drawn in arXiv 2401.10241: device r defers r (2r) weight gradients."""
    orders = one_forward_one_backward(p, m, (lambda r: 2 * (p - r) - 1) if twice else None, kind="B")
    for r, order in enumerate(orders):
        allowed, filled, waiting = (2 * r if twice else r), [], list[int]()
        for ((kind, _, i),) in order:
            filled.append(((kind, r, i),))
            if kind == "B":
                waiting.append(i)
                if len(waiting) > allowed:
                    filled.append((("W", r, waiting.pop(0)),))
        orders[r] = [*filled, *((("W", r, i),) for i in waiting)]
    return orders


def dualpipe_v(p: int, m: int) -> Orders:
    """Return DualPipeV (repository of DualPipe)."""
    return [_dual(p, m, m, r, r, 2 * p - 1 - r) for r in range(p)]


def dualpipe(p: int, m: int) -> Orders:
    """Return DualPipe (arXiv 2412.19437) for an even p: two copies, the second one (parts p to 2p - 1) in
    reverse, with half of the micro-batches each; the first has one more of an odd m."""
    orders: Orders = []
    for r in range(p):
        near, far = (r, 2 * p - 1 - r) if r < p // 2 else (2 * p - 1 - r, r)
        counts = (m - m // 2, m // 2) if r < p // 2 else (m // 2, m - m // 2)
        orders.append(_dual(p // 2, *counts, min(r, p - 1 - r), near, far))
    return orders


def _dual(p: int, m_near: int, m_far: int, r: int, near: int, far: int) -> list[tuple[Pass, ...]]:
    """Return the eight phases of DualPipe on device r of p; a step of two passes is a forward and a backward that
    overlap. `m_near` and `m_far` are the micro-batches of the two parts."""
    m = max(m_near, m_far, 2 * p)
    rest, alone = p - r - 1, r + 1
    steps: list[tuple[tuple[str, int], ...]] = [(("F", near),)] * (2 * rest)
    steps += [(("F", near),), (("F", far),)] * alone
    steps += [(("B", far),), (("W", far),), (("F", far),)] * rest
    middle: list[tuple[tuple[str, int], ...]] = [(("F", near), ("BW", far)), (("F", far), ("BW", near))] * (
        m - 2 * p + r + 1
    )
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
    return numbered(steps, {near: m_near, far: m_far})


def numbered(steps: Iterable[Iterable[tuple[str, int]]], m: Mapping[int, int]) -> list[tuple[Pass, ...]]:
    """Return the passes with their micro-batches; those beyond the count `m` of their part are dropped."""
    count: dict[tuple[str, int], int] = {}
    order = []
    for step in steps:
        passes = []
        for kind, part in step:
            i = count.get((kind[0], part), 0)
            count.update({(letter, part): i + 1 for letter in kind})
            if i < m[part]:
                passes.append((kind, part, i))
        if passes:
            order.append(tuple(passes))
    return order
