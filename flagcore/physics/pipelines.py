"""Pipeline schedules by name, and a simulation of their passes, which timelines and tests of formulas use."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeAlias

from flagcore.domain.prediction import Passes
from flagcore.errors import NotModelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The properties of a pipeline schedule.

    `parts`: the number of virtual stages per device. 0 means the number in the candidate.
    `copies`: the number of copies of parameters, gradients and optimizer state per device.
    `splits_backward`: whether the gradients of activations and of weights are computed in separate passes, so that
    kernels read their inputs twice.
    `post_validation`: whether stages skip the synchronization before the optimizer. The time of a step is then the
    longest time of one stage, from its first forward pass to its last backward pass.
    """

    parts: int = 1
    copies: int = 1
    splits_backward: bool = False
    post_validation: bool = False

    @property
    def folded(self) -> bool:
        """Whether device r of p holds the parts r and 2p - 1 - r, so that the first device also holds the last part."""
        return self.parts == 2 and self.copies == 1


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(),
    "1f1b": Schedule(),
    "interleaved": Schedule(parts=0),
    "zb-h1": Schedule(splits_backward=True),
    "zb-h2": Schedule(splits_backward=True, post_validation=True),
    "zb-1p": Schedule(splits_backward=True, post_validation=True),
    "zb-2p": Schedule(splits_backward=True, post_validation=True),
    "zb-v": Schedule(parts=2, splits_backward=True, post_validation=True),
    "v-half": Schedule(parts=2, splits_backward=True, post_validation=True),
    "v-min": Schedule(parts=2, splits_backward=True, post_validation=True),
    "dualpipe": Schedule(parts=2, copies=2, splits_backward=True),
    "dualpipev": Schedule(parts=2, splits_backward=True),
}
"""The supported schedules by name."""


Pass: TypeAlias = tuple[str, int, int]
"""A pass: its kind, its part of the model and its micro-batch. The kinds are F for a forward pass, B for the gradients
of activations, W for the gradients of weights, and BW for both gradients."""

Orders: TypeAlias = list[list[tuple[Pass, ...]]]
"""For each device, its steps in order. A step is one pass, or two passes that overlap: they start and end together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """The parts of a model, their devices, and the times of their passes.

    `devices[part]`: the device of a part.
    `length`: the number of parts of one copy of the model. The parts of a second copy follow those of the first.
    `seconds[kind][part]`: the time of a pass, for the kinds F, B and W.
    `overlap_share[part]`: the time of overlapping passes as a share of the sum of their times.
    `latency`: the time by which a message delays its receiver.
    `sender_delay`: the time by which a message delays its sender. Steps with overlapping passes hide it.
    """

    devices: Sequence[int]
    length: int
    seconds: Mapping[str, Sequence[float]]
    overlap_share: Sequence[float]
    latency: float = 0.0
    sender_delay: float = 0.0

    def duration(self, step: tuple[Pass, ...]) -> float:
        """Return the seconds of a step, which is one pass or two overlapping passes."""
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

        `ends`: the end times of the passes that have run. A BW pass is listed as B.
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
    """A simulated pass with its times.

    `lane`: -1 or 1 for the first or second of two overlapping passes, else 0.
    """

    device: int
    kind: str
    part: int
    microbatch: int
    start_s: float
    end_s: float
    lane: int = 0


def run(orders: Orders, pipe: Pipe) -> list[ExecutedPass]:
    """Simulate the schedule, and return its passes ordered by device and time. Raises ValueError on a deadlock."""
    ends: dict[Pass, float] = {}
    free_at, next_step = [0.0] * len(orders), [0] * len(orders)
    executed: list[list[ExecutedPass]] = [[] for _ in orders]
    remaining = sum(map(len, orders))
    while remaining:
        remaining_before = remaining
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
        if remaining == remaining_before:
            raise ValueError("deadlock in the schedule")
    return [each for passes in executed for each in passes]


def seconds_of(executed: Sequence[ExecutedPass]) -> tuple[float, float]:
    """Return two times in seconds of simulated passes.

    The first is the end of the last pass. The second is the longest time on one device from the start of its first pass
    to the end of its last pass.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in executed:
        starts[each.device] = min(starts.get(each.device, each.start_s), each.start_s)
        ends[each.device] = max(ends.get(each.device, each.end_s), each.end_s)
    return max(ends.values()), max(ends[device] - start for device, start in starts.items())


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
        orders.append([(pass_,) for pass_ in order])
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
        orders.append([(pass_,) for pass_ in order])
    return orders


def zero_bubble(p: int, m: int, *, h2: bool) -> Orders:
    """Return the order of passes in ZB-H1, or in ZB-H2 if `h2` is true (arXiv 2401.10241).

    Device r defers the gradients of weights of r micro-batches in ZB-H1, and of 2r in ZB-H2.
    """
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
    """Return the order of passes in DualPipeV, as in the repository of DualPipe."""
    return [_dual_steps(p, m, m, r, r, 2 * p - 1 - r) for r in range(p)]


def dualpipe(p: int, m: int) -> Orders:
    """Return the order of passes in DualPipe (arXiv 2412.19437). The number of devices p must be even.

    There are two copies of the model. The second copy (parts p to 2p - 1) runs on the devices in reverse order. Each
    copy processes half of the micro-batches. If m is odd, the first copy processes one more.
    """
    orders: Orders = []
    for r in range(p):
        near, far = (r, 2 * p - 1 - r) if r < p // 2 else (2 * p - 1 - r, r)
        counts = (m - m // 2, m // 2) if r < p // 2 else (m // 2, m - m // 2)
        orders.append(_dual_steps(p // 2, *counts, min(r, p - 1 - r), near, far))
    return orders


def _dual_steps(p: int, m_near: int, m_far: int, r: int, near: int, far: int) -> list[tuple[Pass, ...]]:
    """Return the steps of the eight phases of DualPipe on device r of p.

    A step of two passes overlaps a forward and a backward pass.

    `near` and `far`: the two parts of the device.
    `m_near` and `m_far`: the numbers of micro-batches of these parts.
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
    """Return the steps with a micro-batch number added to each pass.

    `m`: the number of micro-batches of each part. Passes beyond it are dropped.
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


def simulate(passes: Passes, microbatches: int) -> list[ExecutedPass]:
    """Simulate a training step, and return its passes ordered by device and time.

    In DualPipe, the micro-batches of the second copy are numbered after those of the first.

    Raises NotModelled for a schedule whose order depends on the times of passes, for DualPipe on an odd number of
    devices, and for an interleaved schedule if the number of micro-batches is not a multiple of the number of stages.
    """
    pipe = pipe_of(passes)
    executed = run(orders_of(passes, microbatches), pipe)
    if passes.schedule != "dualpipe":
        return executed
    first = microbatches - microbatches // 2
    return [
        replace(each, microbatch=each.microbatch + first) if each.part >= pipe.length else each for each in executed
    ]


def pipe_of(passes: Passes) -> Pipe:
    """Return the parts of the model with their devices and pass times. All parts of one device take the same time."""
    p, schedule = len(passes.forward_s), passes.schedule
    count = SCHEDULES[schedule].parts or passes.virtual
    stages, parts = [*range(p)] * count, float(count)
    if SCHEDULES[schedule].folded:
        stages = [*range(p), *reversed(range(p))]
    if schedule == "dualpipe":
        stages, parts = [*range(p)] * 2, 1.0
    weight_s = passes.weight_s or (0.0,) * p
    activation_s = [backward - weight for backward, weight in zip(passes.backward_s, weight_s, strict=True)]
    seconds = {"F": passes.forward_s, "B": activation_s, "W": weight_s}
    sums = [forward + backward for forward, backward in zip(passes.forward_s, passes.backward_s, strict=True)]
    paired = passes.paired_s or sums
    overlap_share = [min(pair / total, 1.0) if total else 1.0 for pair, total in zip(paired, sums, strict=True)]
    return Pipe(
        devices=[*range(p), *reversed(range(p))] if schedule == "dualpipe" else stages,
        length=p if schedule == "dualpipe" else len(stages),
        seconds={kind: [each[stage] / parts for stage in stages] for kind, each in seconds.items()},
        overlap_share=[overlap_share[stage] for stage in stages],
        latency=0.0 if passes.sender_waits else passes.send_s,
        sender_delay=passes.send_s if passes.sender_waits else 0.0,
    )


def orders_of(passes: Passes, m: int) -> Orders:
    """Return the order of passes on each device in a step of m micro-batches. Raises NotModelled like `simulate`."""
    p, schedule = len(passes.forward_s), passes.schedule
    if schedule == "interleaved" and passes.virtual > 1:
        if m > p and m % p:
            raise NotModelled(f"interleaved needs a multiple of {p} micro-batches, not {m}")
        return interleaved(p, m, passes.virtual)
    if schedule in ("1f1b", "interleaved"):
        return one_forward_one_backward(p, m)
    if schedule == "gpipe":
        return one_forward_one_backward(p, m, lambda r: m)
    if schedule in ("zb-h1", "zb-h2"):
        return zero_bubble(p, m, h2=schedule == "zb-h2")
    if schedule == "dualpipev":
        return dualpipe_v(p, m)
    if schedule == "dualpipe":
        if p % 2:
            raise NotModelled(f"dualpipe needs an even number of stages, not {p}")
        return dualpipe(p, m)
    raise NotModelled(f"the order of passes in {schedule} depends on their times")


def step_seconds(passes: Passes, executed: Sequence[ExecutedPass]) -> float:
    """Return the seconds of a simulated step.

    It is the end of the last pass. For schedules with `post_validation`, it is the longest time on one device from the
    start of its first pass to the end of its last pass.
    """
    end, span = seconds_of(executed)
    return span if SCHEDULES[passes.schedule].post_validation else end
