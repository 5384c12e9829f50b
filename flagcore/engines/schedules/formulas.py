"""The time of a step of a pipeline schedule, and the micro-batches that a stage holds at once.

The deviation of each formula from the simulated order is given in its docstring. With the profiled times of 12
published settings (arXiv 2401.10241) the 48 published steps of 1F1B, interleaved, ZB-1p and ZB-2p come out within 4%.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray
from flagcore.engines.schedules import critical_path, v_formulas
from flagcore.engines.schedules.critical_path import StageTimes
from flagcore.physics.schedules.catalogue import SCHEDULES


def makespan(schedule: str, times: StageTimes, microbatches: FloatArray, virtual: FloatArray) -> FloatArray:
    """Return the seconds from the first forward of a step to the last backward of all stages, per candidate.

    `microbatches` and `virtual` are counts, as floats, (candidates,); only `interleaved` uses `virtual`. All
    candidates have pipelines of the same length. With `Schedule.post_validation` it is the longest span of one stage.
    """
    m, p = microbatches, len(times.forward)
    if p == 1:
        alone: FloatArray = m * times.busy[0]
        return alone
    if schedule == "gpipe":
        return critical_path.gpipe(times, m)
    if schedule == "1f1b":
        return critical_path.one_forward_one_backward(times, m)
    if schedule == "interleaved":
        return critical_path.interleaved(times, m, virtual)
    if schedule.startswith("zb-") and schedule != "zb-v":
        return _zero_bubble(schedule, times, m)
    one_pass = (times.forward + times.backward_input).sum(axis=0) + times.backward_weight[0]
    total: FloatArray = np.maximum(_TWOFOLD[schedule](times, m), one_pass + 2.0 * (p - 1.0) * times.send)
    return total


def in_flight(
    schedule: str, index: FloatArray, pipeline: FloatArray, virtual: FloatArray, microbatches: FloatArray
) -> FloatArray:
    """Return the micro-batches whose activations stage `index` holds at most before their backward.

    In units of one micro-batch's activations of the whole stage (all parts of the device), at most m; arrays of one
    shape. 1F1B p - r (arXiv 2104.04473); interleaved 2 (p - r - 1) + (v - 1) p + 1 parts of v (the same paper); ZB-H1
    and ZB-1p p - r, ZB-H2 and ZB-2p 2 (p - r) - 1 (arXiv 2401.10241); ZB-V p, V-Half p / 2 + 1, V-Min (p + 4) / 3,
    rounded down (arXiv 2405.15362); DualPipe p + 1 and DualPipeV (2p + 1) / 2 (its repository). Activations kept
    for W only are added by `deferred`.
    """
    behind = pipeline - 1.0 - index
    one: FloatArray = np.ones_like(behind)
    most = behind + 1.0
    if schedule == "gpipe":
        most = microbatches * one
    elif schedule == "interleaved":
        most = np.where(virtual > 1, (2.0 * behind + (virtual - 1.0) * pipeline + 1.0) / virtual, most)
    elif schedule in ("zb-h2", "zb-2p"):
        most = 2.0 * behind + 1.0
    elif schedule == "zb-v":
        most = pipeline * one
    elif schedule == "v-half":
        most = (pipeline + 2.0) // 2.0 * one
    elif schedule == "v-min":
        most = (pipeline + 4.0) // 3.0 * one
    elif schedule == "dualpipe":
        most = pipeline + one
    elif schedule == "dualpipev":
        most = pipeline + 0.5 * one
    held: FloatArray = np.minimum(np.where(pipeline > 1, most, 1.0), microbatches)
    return held


def deferred(
    schedule: str,
    index: FloatArray,
    pipeline: FloatArray,
    microbatches: FloatArray,
    weight_share: FloatArray | float = 0.4,
) -> FloatArray:
    """Return the micro-batches of which stage `index` holds only the inputs of W, at the moment of `in_flight`.

    W needs the inputs of the linear layers and the gradients of their outputs, not what attention saved. Later stages
    of ZB-H1 and ZB-1p hold r, of ZB-H2 2r. ZB-2p holds what fits in 2p micro-batches, each W counting
    `weight_share` of one (`StageTimes.weight_share`), so all 2p with a share of 1. The V family and DualPipe
    reach their maximum when nothing waits: 0.
    """
    held = in_flight(schedule, index, pipeline, np.ones_like(index), microbatches)
    waiting: FloatArray = np.zeros_like(held)
    if schedule in ("zb-h1", "zb-1p"):
        waiting = waiting + index
    elif schedule == "zb-h2":
        waiting = waiting + 2.0 * index
    elif schedule == "zb-2p":
        waiting = waiting + (2.0 * index + 1.0) / weight_share
    return np.minimum(np.where(pipeline > 1, waiting, 0.0), microbatches - held)


_TWOFOLD = {
    "zb-v": v_formulas.zero_bubble_v,
    "v-half": v_formulas.v_half,
    "v-min": v_formulas.v_min,
    "dualpipe": v_formulas.dualpipe,
    "dualpipev": v_formulas.dualpipe_v,
}


def _zero_bubble(schedule: str, times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of ZB-H1, ZB-H2, ZB-1p or ZB-2p from the forwards before a stage's first backward (`warm`)
    and the W after its last B (`delayed`).

    ZB-H1 and ZB-1p keep p micro-batches; ZB-H2 2p - 1 with F = B = W in mind. ZB-2p is planned for the middle stage:
    forwards until the first backward arrives, W until the other stages are done, both limited by 2p. The plan of
    ZB-1p is used where it is better.
    """
    p, barrier = len(times.forward), not SCHEDULES[schedule].post_validation
    r = np.arange(p, dtype=np.float64)[:, None]
    if schedule == "zb-h2":
        return critical_path.deferred_weights(times, m, 2.0 * (p - r) - 1.0, 2.0 * r + 1.0, barrier=barrier)
    small = critical_path.deferred_weights(times, m, p - r, r + 1.0, barrier=barrier)
    if schedule != "zb-2p":
        return small
    f, b, w = (x[p // 2] for x in (times.forward, times.backward_input, times.backward_weight))
    turn = f + b + 2.0 * times.send
    warm = np.minimum(2.0 * p - r, 1.0 + (p - 1.0 - r) * turn / np.maximum(f, 1e-30))
    delayed = np.minimum((2.0 * p - 1.0) / times.weight_share + 1.0, r * turn / np.maximum(w, 1e-30) + 1.0)
    return np.minimum(small, critical_path.deferred_weights(times, m, warm, delayed, barrier=barrier))


def pipeline_seconds(passes: Passes) -> float:
    """Return the seconds of a step of one candidate by the formula of its schedule."""
    forward, backward, weight, paired = (
        np.array(each)[:, None] for each in (passes.forward_s, passes.backward_s, passes.weight_s, passes.paired_s)
    )
    times = StageTimes(
        forward=forward,
        backward_input=backward - weight if passes.weight_s else backward,
        backward_weight=weight if passes.weight_s else np.zeros_like(backward),
        send=np.array([passes.send_s]),
        blocking=float(passes.sender_waits),
        weight_share=passes.weight_share,
        paired=paired if passes.paired_s else None,
    )
    counts = np.array([float(passes.microbatches)]), np.array([float(passes.virtual)])
    return float(makespan(passes.schedule, times, *counts)[0])
