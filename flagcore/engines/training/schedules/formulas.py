"""The time of a step of a pipeline schedule, and the micro-batches in flight on a stage.

Each docstring gives the deviation of its formula from the simulated order. For the profiled times of 12 published
settings (arXiv 2401.10241) the formulas predict the 48 published steps of 1F1B, interleaved, ZB-1p and ZB-2p within
4%.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flagcore.domain.prediction import Passes
from flagcore.domain.space import FloatArray
from flagcore.engines.training.schedules import critical_path, v_formulas
from flagcore.engines.training.schedules.critical_path import StageTimes
from flagcore.physics.schedules.catalogue import SCHEDULES


def makespan(schedule: str, times: StageTimes, microbatches: FloatArray, virtual: FloatArray) -> FloatArray:
    """Return the seconds from the first forward of a step to the last backward of all stages, per candidate.

    `microbatches` and `virtual` are float counts of shape (candidates,); only `interleaved` uses `virtual`. All
    candidates have pipelines of the same length. With `Schedule.post_validation` the time is the longest span of one
    stage.
    """
    m, p = microbatches, len(times.forward)
    if p == 1:
        single_stage: FloatArray = m * times.busy[0]
        return single_stage
    if schedule == "interleaved":
        return critical_path.interleaved(times, m, virtual)
    if schedule in ("gpipe", "1f1b"):
        return (critical_path.gpipe if schedule == "gpipe" else critical_path.one_forward_one_backward)(times, m)
    if schedule.startswith("zb-") and schedule != "zb-v":
        return _zero_bubble(schedule, times, m)
    one_pass = (times.forward + times.backward_input).sum(axis=0) + times.backward_weight[0]
    total: FloatArray = np.maximum(_V_FORMULAS[schedule](times, m), one_pass + 2.0 * (p - 1.0) * times.send)
    return total


def in_flight(
    schedule: str, index: FloatArray, pipeline: FloatArray, virtual: FloatArray, microbatches: FloatArray
) -> FloatArray:
    """Return the maximum number of micro-batches whose activations stage `index` holds before their backward.

    The unit is one micro-batch's activations on all virtual stages of the device; the maximum is m. 1F1B: p - r
    (arXiv 2104.04473); interleaved: 2 (p - r - 1) + (v - 1) p + 1 parts of v (the same paper); ZB-H1 and ZB-1p: p - r,
    ZB-H2 and ZB-2p: 2 (p - r) - 1 (arXiv 2401.10241); ZB-V: p, V-Half: p / 2 + 1, V-Min: (p + 4) / 3, rounded down
    (arXiv 2405.15362); DualPipe: p + 1 and DualPipeV: (2p + 1) / 2 (its repository). `deferred` returns those held only
    for W.
    """
    later, count = pipeline - 1.0 - index, microbatches * np.ones_like(pipeline - index)
    if schedule == "interleaved":
        chunks = 2.0 * later + (virtual - 1.0) * pipeline + 1.0
        count = np.where(virtual > 1, chunks / virtual, later + 1.0)
    elif schedule != "gpipe":
        count = _HELD[schedule](later, pipeline) if schedule in _HELD else later + 1.0
    result: FloatArray = np.minimum(np.where(pipeline > 1, count, 1.0), microbatches)
    return result


_HELD: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "zb-h2": lambda later, pipeline: 2.0 * later + 1.0,
    "zb-2p": lambda later, pipeline: 2.0 * later + 1.0,
    "zb-v": lambda later, pipeline: pipeline,
    "v-half": lambda later, pipeline: (pipeline + 2.0) // 2.0,
    "v-min": lambda later, pipeline: (pipeline + 4.0) // 3.0,
    "dualpipe": lambda later, pipeline: pipeline + 1.0,
    "dualpipev": lambda later, pipeline: pipeline + 0.5,
}
"""Micro-batches that a stage holds, by the number of later stages and of all; in other schedules one for each later
stage, and its own."""


def deferred(
    schedule: str,
    index: FloatArray,
    pipeline: FloatArray,
    microbatches: FloatArray,
    weight_share: FloatArray | float = 0.4,
) -> FloatArray:
    """Return the number of micro-batches whose inputs of W alone are held by stage `index` at the peak of `in_flight`.

    W needs the inputs of the linear layers and the gradients of their outputs, not the tensors of attention. Stage r
    holds r in ZB-H1 and ZB-1p, 2r in ZB-H2. In ZB-2p it holds as many as fit in 2p micro-batches, where each counts
    `weight_share` (`StageTimes.weight_share`) of one. The V family and DualPipe hold 0 at their peak.
    """
    held_count = in_flight(schedule, index, pipeline, np.ones_like(index), microbatches)
    waiting = {"zb-h1": 1.0, "zb-1p": 1.0, "zb-h2": 2.0}.get(schedule, 0.0) * index
    if schedule == "zb-2p":
        waiting = (2.0 * index + 1.0) / weight_share
    return np.minimum(np.where(pipeline > 1, waiting, 0.0), microbatches - held_count)


_V_FORMULAS = {
    "zb-v": v_formulas.zero_bubble_v,
    "v-half": v_formulas.v_half,
    "v-min": v_formulas.v_min,
    "dualpipe": v_formulas.dualpipe,
    "dualpipev": v_formulas.dualpipe_v,
}


def _zero_bubble(schedule: str, times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of ZB-H1, ZB-H2, ZB-1p or ZB-2p.

    ZB-H1 and ZB-1p hold p micro-batches, ZB-H2 2p - 1, which is optimal for F = B = W. ZB-2p is planned for the middle
    stage: forwards until the first backward arrives, W until the other stages are done, both limited by 2p; the plan
    of ZB-1p replaces it if it is faster.
    """
    p, barrier = len(times.forward), not SCHEDULES[schedule].post_validation
    r = np.arange(p, dtype=np.float64)[:, None]
    if schedule == "zb-h2":
        return critical_path.deferred_weights(times, m, 2.0 * (p - r) - 1.0, 2.0 * r + 1.0, barrier=barrier)
    with_1p_plan = critical_path.deferred_weights(times, m, p - r, r + 1.0, barrier=barrier)
    if schedule != "zb-2p":
        return with_1p_plan
    f, b, w = (x[p // 2] for x in (times.forward, times.backward_input, times.backward_weight))
    turn = f + b + 2.0 * times.send
    warm = np.minimum(2.0 * p - r, 1.0 + (p - 1.0 - r) * turn / np.maximum(f, 1e-30))
    delayed = np.minimum((2.0 * p - 1.0) / times.weight_share + 1.0, r * turn / np.maximum(w, 1e-30) + 1.0)
    return np.minimum(with_1p_plan, critical_path.deferred_weights(times, m, warm, delayed, barrier=barrier))


def pipeline_seconds(passes: Passes) -> float:
    """Return the seconds of a step of one candidate."""
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
