"""Simulates the pipeline passes of a step, for timelines and for checking the formulas of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flagcore.domain.prediction import Passes
from flagcore.errors import NotModelled
from flagcore.physics.schedules import orders
from flagcore.physics.schedules.catalogue import SCHEDULES
from flagcore.physics.schedules.execution import ExecutedPass, Orders, Pipe, run, seconds_of


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
    return [_renumber(each, pipe.length, microbatches) for each in executed]


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
        return orders.interleaved(p, m, passes.virtual)
    if schedule in ("1f1b", "interleaved"):
        return orders.one_forward_one_backward(p, m)
    if schedule == "gpipe":
        return orders.one_forward_one_backward(p, m, lambda r: m)
    if schedule in ("zb-h1", "zb-h2"):
        return orders.zero_bubble(p, m, h2=schedule == "zb-h2")
    if schedule == "dualpipev":
        return orders.dualpipe_v(p, m)
    if schedule == "dualpipe":
        if p % 2:
            raise NotModelled(f"dualpipe needs an even number of stages, not {p}")
        return orders.dualpipe(p, m)
    raise NotModelled(f"the order of passes in {schedule} depends on their times")


def step_seconds(passes: Passes, executed: Sequence[ExecutedPass]) -> float:
    """Return the seconds of a simulated step: the end of the last pass, or for schedules with post-validation the
    longest time from the first start to the last end on one device."""
    end, span = seconds_of(executed)
    return span if SCHEDULES[passes.schedule].post_validation else end


def _renumber(executed: ExecutedPass, length: int, microbatches: int) -> ExecutedPass:
    """Return a pass of DualPipe with the micro-batches of the second copy numbered after those of the first."""
    if executed.part < length:
        return executed
    return replace(executed, microbatch=executed.microbatch + microbatches - microbatches // 2)
