"""Simulates the pipeline of a step pass by pass, for the timeline and to check the formulas of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flagcore.domain.prediction import Passes
from flagcore.errors import NotModelled
from flagcore.physics.schedules import orders
from flagcore.physics.schedules.catalogue import SCHEDULES
from flagcore.physics.schedules.execution import ExecutedPass, Orders, Pipe, run, seconds_of


def simulate(passes: Passes, microbatches: int) -> list[ExecutedPass]:
    """Return the passes of a step with `microbatches`, device by device in the order of time.

    In DualPipe micro-batches are numbered through both copies: the later half enters at the last device. Raises
    NotModelled for a schedule whose order its scheduler plans with the times of passes, for DualPipe on an odd number
    of devices, and for interleaved if the number of stages does not divide the micro-batches.
    """
    pipe = pipe_of(passes)
    done = run(orders_of(passes, microbatches), pipe)
    if passes.schedule != "dualpipe":
        return done
    return [_renumbered(each, pipe.length, microbatches) for each in done]


def pipe_of(passes: Passes) -> Pipe:
    """Return the parts of the model on their devices; the parts of one device are equal."""
    p, schedule = len(passes.forward_s), passes.schedule
    count = SCHEDULES[schedule].parts or passes.virtual
    stages, parts = [*range(p)] * count, float(count)
    if SCHEDULES[schedule].folded:
        stages = [*range(p), *reversed(range(p))]
    if schedule == "dualpipe":
        stages, parts = [*range(p)] * 2, 1.0
    weight = passes.weight_s or (0.0,) * p
    back = [whole - part for whole, part in zip(passes.backward_s, weight, strict=True)]
    seconds = {"F": passes.forward_s, "B": back, "W": weight}
    busy = [forward + backward for forward, backward in zip(passes.forward_s, passes.backward_s, strict=True)]
    paired = passes.paired_s or busy
    together = [min(one / both, 1.0) if both else 1.0 for one, both in zip(paired, busy, strict=True)]
    return Pipe(
        devices=[*range(p), *reversed(range(p))] if schedule == "dualpipe" else stages,
        length=p if schedule == "dualpipe" else len(stages),
        seconds={kind: [each[stage] / parts for stage in stages] for kind, each in seconds.items()},
        together=[together[stage] for stage in stages],
        latency=0.0 if passes.sender_waits else passes.send_s,
        waits=passes.send_s if passes.sender_waits else 0.0,
    )


def orders_of(passes: Passes, m: int) -> Orders:
    """Return the order of passes of each device in a step of m micro-batches."""
    p, schedule = len(passes.forward_s), passes.schedule
    if schedule == "interleaved" and passes.virtual > 1:
        if m > p and m % p:
            raise NotModelled(f"interleaved needs a multiple of {p} micro-batches, not {m}")
        return orders.interleaved(p, m, passes.virtual)
    if schedule in ("1f1b", "interleaved"):
        return orders.one_forward_one_backward(p, m)
    if schedule == "gpipe":
        return orders.one_forward_one_backward(p, m, lambda r: m)
    if schedule in ("zb-h1", "zb-h2"):
        return orders.deferring(p, m, twice=schedule == "zb-h2")
    if schedule == "dualpipev":
        return orders.dualpipe_v(p, m)
    if schedule == "dualpipe":
        if p % 2:
            raise NotModelled(f"dualpipe needs an even number of stages, not {p}")
        return orders.dualpipe(p, m)
    raise NotModelled(f"the scheduler of {schedule} plans the order of passes with their times")


def step_seconds(passes: Passes, done: Sequence[ExecutedPass]) -> float:
    """Return the seconds of a simulated step: until all devices are done or, for schedules without a barrier before the
    optimizer, the longest time from a device's first pass to its last."""
    whole, span = seconds_of(done)
    return span if SCHEDULES[passes.schedule].post_validation else whole


def _renumbered(one: ExecutedPass, length: int, microbatches: int) -> ExecutedPass:
    """Return a pass of DualPipe's second copy with its micro-batch numbered after those of the first."""
    if one.part < length:
        return one
    return replace(one, microbatch=one.microbatch + microbatches - microbatches // 2)
