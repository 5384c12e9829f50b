"""The order of passes on each device, for schedules that do not depend on the times of passes.

Symbols: p devices, m micro-batches, r a device. Device r has part r; with v virtual stages also r + p and so on; in
DualPipeV also part 2p - 1 - r; in DualPipe also a part of a second copy that runs in reverse. If a schedule is defined
only for larger m, the order is that of a larger m without the missing micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

from flagcore.physics.schedules.execution import Orders, Pass


def one_forward_one_backward(p: int, m: int, warmup: Callable[[int], int] | None = None, kind: str = "BW") -> Orders:
    """Return the order of 1F1B (arXiv 2104.04473).

    Device r starts with `warmup(r)` forward passes, by default p - r, and then alternates between backward and forward
    passes. With as many warm-up passes as micro-batches, the order is that of GPipe (arXiv 1811.06965).
    """
    orders: Orders = []
    for r in range(p):
        warmup_count = min(warmup(r) if warmup else p - r, m)
        order = [("F", r, i) for i in range(warmup_count)]
        for i in range(m):
            order += [(kind, r, i)] + [("F", r, i + warmup_count)] * (i + warmup_count < m)
        orders.append([(pass_,) for pass_ in order])
    return orders


def interleaved(p: int, m: int, v: int) -> Orders:
    """Return the order of interleaved 1F1B (arXiv 2104.04473): p micro-batches on a virtual stage, then on the next."""
    table = [(i, c) for a in range(0, m, p) for c in range(v) for i in range(a, min(a + p, m))]
    orders: Orders = []
    for r in range(p):
        forwards = [("F", c * p + r, i) for i, c in table]
        backwards = [("BW", (v - 1 - c) * p + r, i) for i, c in table]
        warmup = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        order: list[Pass] = forwards[:warmup]
        for forward, backward in zip_longest(forwards[warmup:], backwards):
            order += [forward, backward] if forward else [backward]
        orders.append([(pass_,) for pass_ in order])
    return orders


def zero_bubble(p: int, m: int, *, h2: bool) -> Orders:
    """Return the order of ZB-H1, or of ZB-H2, as in arXiv 2401.10241: device r defers r, or 2r, weight gradients."""
    orders = one_forward_one_backward(p, m, (lambda r: 2 * (p - r) - 1) if h2 else None, kind="B")
    for r, order in enumerate(orders):
        max_deferred, new_order, deferred = (2 * r if h2 else r), [], list[int]()
        for ((kind, _, i),) in order:
            new_order.append(((kind, r, i),))
            if kind == "B":
                deferred.append(i)
                if len(deferred) > max_deferred:
                    new_order.append((("W", r, deferred.pop(0)),))
        orders[r] = [*new_order, *((("W", r, i),) for i in deferred)]
    return orders


def dualpipe_v(p: int, m: int) -> Orders:
    """Return the order of DualPipeV, as in the repository of DualPipe."""
    return [_dual_steps(p, m, m, r, r, 2 * p - 1 - r) for r in range(p)]


def dualpipe(p: int, m: int) -> Orders:
    """Return the order of DualPipe (arXiv 2412.19437) for an even p.

    There are two copies of the model, and the second one (parts p to 2p - 1) runs in reverse. Each has half of the
    micro-batches; for an odd m, the first copy has one more.
    """
    orders: Orders = []
    for r in range(p):
        near, far = (r, 2 * p - 1 - r) if r < p // 2 else (2 * p - 1 - r, r)
        counts = (m - m // 2, m // 2) if r < p // 2 else (m // 2, m - m // 2)
        orders.append(_dual_steps(p // 2, *counts, min(r, p - 1 - r), near, far))
    return orders


def _dual_steps(p: int, m_near: int, m_far: int, r: int, near: int, far: int) -> list[tuple[Pass, ...]]:
    """Return the eight phases of DualPipe on device r of p. In steps of two passes, forward and backward overlap.

    `near` and `far` are the two parts of the device, `m_near` and `m_far` their numbers of micro-batches.
    """
    m = max(m_near, m_far, 2 * p)
    remaining, leading = p - r - 1, r + 1
    steps: list[tuple[tuple[str, int], ...]] = [(("F", near),)] * (2 * remaining)
    steps += [(("F", near),), (("F", far),)] * leading
    steps += [(("B", far),), (("W", far),), (("F", far),)] * remaining
    overlapping: list[tuple[tuple[str, int], ...]] = [(("F", near), ("BW", far)), (("F", far), ("BW", near))] * (
        m - 2 * p + r + 1
    )
    if remaining == 0:
        overlapping[:1] = [(("F", near),), (("BW", far),)]
    steps += overlapping + [(("BW", far),), (("F", far), ("BW", near))] * remaining
    closing = [("BW", far), ("BW", near)] * leading
    split = 2 * (leading // 2) + (1 if r % 2 == 0 else 0)
    steps += [((("BW" if k < split else "B"), part),) for k, (_, part) in enumerate(closing)]
    waiting = [("W", part) for _, part in closing[split:]]
    for _ in range(remaining):
        steps += [(waiting.pop(0),), (("B", near),)]
        waiting.append(("W", near))
    steps += [(pass_,) for pass_ in waiting]
    return number_microbatches(steps, {near: m_near, far: m_far})


def number_microbatches(steps: Iterable[Iterable[tuple[str, int]]], m: Mapping[int, int]) -> list[tuple[Pass, ...]]:
    """Return the steps with the micro-batch of each pass. Passes beyond the `m` micro-batches of their part are
    dropped.
    """
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
