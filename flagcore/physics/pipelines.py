"""Pipeline schedules by name, and a simulation of their passes, for timelines and for checking formulas of engines."""

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

    `parts` is the number of virtual stages per device; 0: that of the candidate. `copies` is the number of copies of
    parameters, gradients and optimizer state per device. With `splits_backward`, the gradients of activations and of
    weights are computed in separate passes, so kernels read their inputs twice. With `post_validation`, stages are not
    synchronized before the optimizer; the time of a step is then the longest time of one stage, from its first forward
    pass to its last backward pass.
    """

    parts: int = 1
    copies: int = 1
    splits_backward: bool = False
    post_validation: bool = False

    @property
    def folded(self) -> bool:
        """Whether device r of p has the parts r and 2p - 1 - r, so that the first device also has the last part."""
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
"""The schedules that are modelled, by name."""


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
    """Return the end of the last pass, and the longest time from the first start to the last end on one device."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for each in executed:
        starts[each.device] = min(starts.get(each.device, each.start_s), each.start_s)
        ends[each.device] = max(ends.get(each.device, each.end_s), each.end_s)
    return max(ends.values()), max(ends[device] - start for device, start in starts.items())


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


def simulate(passes: Passes, microbatches: int) -> list[ExecutedPass]:
    """Return the passes of a step with `microbatches` micro-batches, ordered by device and time.

    In DualPipe, the micro-batches of the second copy are numbered after those of the first. Raises NotModelled for a
    schedule whose order depends on the times of passes, for DualPipe on an odd number of devices, and for an
    interleaved schedule if the number of micro-batches is not a multiple of the number of stages.
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
    """Return the devices and the pass times of the parts of the model. The parts of one device take the same time."""
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
    """Return the order of passes on each device in a step of m micro-batches."""
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
    """Return the seconds of a simulated step: the end of the last pass, or for schedules with post-validation the
    longest time from the first start to the last end on one device."""
    end, span = seconds_of(executed)
    return span if SCHEDULES[passes.schedule].post_validation else end
