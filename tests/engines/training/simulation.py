"""Simulates a training step pass by pass, as a reference for the formulas of pipeline schedules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

from flagcore.domain.prediction import Passes
from flagcore.physics.pipelines import SCHEDULES

Pass: TypeAlias = tuple[str, int, int]
"""A pass: its kind, its part of the model and its micro-batch. The kinds are F for a forward pass, B for the gradients
of activations, W for the gradients of weights, and BW for both gradients."""

Orders: TypeAlias = list[list[Pass]]
"""The passes of each device in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """The parts of a model, their devices, and the times of their passes.

    `devices[part]`: the device of a part.
    `seconds[kind][part]`: the time of a pass, for the kinds F, B and W.
    `latency`: the time by which a message delays its receiver.
    `sender_delay`: the time by which a message delays its sender.
    """

    devices: Sequence[int]
    seconds: Mapping[str, Sequence[float]]
    latency: float = 0.0
    sender_delay: float = 0.0

    def sends(self, pass_: Pass) -> bool:
        """Return whether a pass sends its result to another device."""
        kind, part, _ = pass_
        target = part + 1 if kind == "F" else part - 1
        return kind != "W" and 0 <= target < len(self.devices) and self.devices[part] != self.devices[target]

    def ready(self, pass_: Pass, ends: Mapping[Pass, float]) -> float | None:
        """Return the time at which the input of a pass is available, or None if it is not known yet.

        `ends`: the end times of the passes that have run. A BW pass is listed as B.
        """
        kind, part, batch = pass_
        if kind == "F" and part == 0:
            return 0.0
        if kind == "W":
            return ends.get(("B", part, batch))
        if kind == "F":
            source, source_kind = part - 1, "F"
        elif part == len(self.devices) - 1:
            source, source_kind = part, "F"
        else:
            source, source_kind = part + 1, "B"
        end = ends.get((source_kind, source, batch))
        return end if end is None or self.devices[source] == self.devices[part] else end + self.latency


@dataclass(frozen=True, slots=True)
class ExecutedPass:
    """A simulated pass with its times."""

    device: int
    kind: str
    part: int
    microbatch: int
    start_s: float
    end_s: float


def run(orders: Orders, pipe: Pipe) -> list[ExecutedPass]:
    """Simulate the schedule, and return its passes ordered by device and time."""
    ends: dict[Pass, float] = {}
    free_at = [0.0] * len(orders)
    executed: list[list[ExecutedPass]] = [[] for _ in orders]
    remaining = sum(map(len, orders))
    while remaining:
        remaining_before = remaining
        for device, order in enumerate(orders):
            while len(executed[device]) < len(order):
                pass_ = order[len(executed[device])]
                if (ready := pipe.ready(pass_, ends)) is None:
                    break
                kind, part, batch = pass_
                start = max(free_at[device], ready)
                end = start + sum(pipe.seconds[letter][part] for letter in kind)
                free_at[device] = end + (pipe.sender_delay if pipe.sends(pass_) else 0.0)
                ends["B" if kind == "BW" else kind, part, batch] = free_at[device]
                executed[device].append(ExecutedPass(device, kind, part, batch, start, end))
                remaining -= 1
        if remaining == remaining_before:
            raise ValueError("deadlock in the schedule")
    return [each for passes in executed for each in passes]


def one_forward_one_backward(p: int, m: int, warmup: Callable[[int], int] | None = None, kind: str = "BW") -> Orders:
    """Return the order of passes in 1F1B (arXiv 2104.04473) with p devices and m micro-batches.

    Device r starts with `warmup(r)` forward passes, by default p - r, and then alternates between backward and forward
    passes. If there are as many warm-up passes as micro-batches, the schedule is GPipe (arXiv 1811.06965).

    `kind`: the kind of the backward passes.
    """
    orders: Orders = []
    for r in range(p):
        warmup_count = min(warmup(r) if warmup else p - r, m)
        order = [("F", r, i) for i in range(warmup_count)]
        for i in range(m):
            order += [(kind, r, i)] + [("F", r, i + warmup_count)] * (i + warmup_count < m)
        orders.append(order)
    return orders


def interleaved(p: int, m: int, v: int) -> Orders:
    """Return the order of passes in interleaved 1F1B (arXiv 2104.04473) with v virtual stages per device.

    Each device processes p micro-batches on one virtual stage, then the same ones on the next.
    """
    table = [(i, c) for a in range(0, m, p) for c in range(v) for i in range(a, min(a + p, m))]
    orders: Orders = []
    for r in range(p):
        forwards = [("F", c * p + r, i) for i, c in table]
        backwards = [("BW", (v - 1 - c) * p + r, i) for i, c in table]
        warmup = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
        order: list[Pass] = forwards[:warmup]
        for forward, backward in zip_longest(forwards[warmup:], backwards):
            order += [forward, backward] if forward else [backward]
        orders.append(order)
    return orders


def zero_bubble(p: int, m: int, *, h2: bool) -> Orders:
    """Return the order of passes in ZB-H1, or in ZB-H2 if `h2` is true (arXiv 2401.10241).

    Device r defers the gradients of weights of r micro-batches in ZB-H1, and of 2r in ZB-H2.
    """
    orders = one_forward_one_backward(p, m, (lambda r: 2 * (p - r) - 1) if h2 else None, kind="B")
    for r, order in enumerate(orders):
        max_deferred, new_order, deferred = (2 * r if h2 else r), [], list[int]()
        for kind, _, i in order:
            new_order.append((kind, r, i))
            if kind == "B":
                deferred.append(i)
                if len(deferred) > max_deferred:
                    new_order.append(("W", r, deferred.pop(0)))
        orders[r] = [*new_order, *(("W", r, i) for i in deferred)]
    return orders


def simulate(passes: Passes, microbatches: int) -> list[ExecutedPass]:
    """Simulate a training step, and return its passes ordered by device and time."""
    return run(orders_of(passes, microbatches), pipe_of(passes))


def pipe_of(passes: Passes) -> Pipe:
    """Return the parts of the model with their devices and pass times. All parts of one device take the same time."""
    p, count = len(passes.forward_s), SCHEDULES[passes.schedule].parts or passes.virtual
    stages = [*range(p)] * count
    weight_s = passes.weight_s or (0.0,) * p
    activation_s = [backward - weight for backward, weight in zip(passes.backward_s, weight_s, strict=True)]
    seconds = {"F": passes.forward_s, "B": activation_s, "W": weight_s}
    return Pipe(
        devices=stages,
        seconds={kind: [each[stage] / count for stage in stages] for kind, each in seconds.items()},
        latency=0.0 if passes.sender_waits else passes.send_s,
        sender_delay=passes.send_s if passes.sender_waits else 0.0,
    )


def orders_of(passes: Passes, m: int) -> Orders:
    """Return the order of passes on each device in a step of m micro-batches."""
    p, schedule = len(passes.forward_s), passes.schedule
    if schedule == "interleaved" and passes.virtual > 1:
        return interleaved(p, m, passes.virtual)
    if schedule in ("1f1b", "interleaved"):
        return one_forward_one_backward(p, m)
    if schedule == "gpipe":
        return one_forward_one_backward(p, m, lambda r: m)
    if schedule in ("zb-h1", "zb-h2"):
        return zero_bubble(p, m, h2=schedule == "zb-h2")
    raise ValueError(f"the order of passes in {schedule} is not simulated")


def step_seconds(passes: Passes, executed: Sequence[ExecutedPass]) -> float:
    """Return the seconds of a simulated step.

    It is the end of the last pass. For schedules with `post_validation`, it is the longest time on one device from the
    start of its first pass to the end of its last pass.
    """
    if not SCHEDULES[passes.schedule].post_validation:
        return max(each.end_s for each in executed)
    by_device = [[each for each in executed if each.device == stage] for stage in range(len(passes.forward_s))]
    return max(each[-1].end_s - each[0].start_s for each in by_device)
