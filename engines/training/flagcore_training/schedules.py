"""The time of a step under a pipeline schedule, and the number of micro-batches in flight on a stage.

Each docstring gives the deviation of its formula from a simulation of the schedule. For the profiled times of 12
published settings (arXiv 2401.10241), the formulas predict the 48 published step times of 1F1B, interleaved 1F1B, ZB-1p
and ZB-2p within 4%.

Schedules with two parts of the model per device (the V family and DualPipe) are limited by the slowest device or, with
little memory, by a round through all devices. The times of filling and draining are linear in the times of F, B and W,
with coefficients from the published orders for p of 3 to 12. The symbols are those in `critical_path`. The deviations
of these schedules are the maxima for m from 2p to 4p, in this order: for even stages, for uneven first and last stages,
and if all stages differ.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore_training import critical_path
from flagcore_training.critical_path import StageTimes


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


def makespan(schedule: str, times: StageTimes, microbatches: FloatArray, virtual: FloatArray) -> FloatArray:
    """Return the time from the first forward to the last backward of a step in seconds, for each candidate.

    `microbatches` and `virtual` are counts as floats, with shape (candidates,); only `interleaved` uses `virtual`. All
    candidates have pipelines of the same length. With `Schedule.post_validation`, the result is the longest span of one
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

    The unit is the activations of one micro-batch on all virtual stages of the device; the maximum is m. 1F1B: p - r
    (arXiv 2104.04473); interleaved: 2 (p - r - 1) + (v - 1) p + 1 parts of v (the same paper); ZB-H1 and ZB-1p: p - r,
    ZB-H2 and ZB-2p: 2 (p - r) - 1 (arXiv 2401.10241); ZB-V: p, V-Half: p / 2 + 1, V-Min: (p + 4) / 3, rounded down
    (arXiv 2405.15362); DualPipe: p + 1 and DualPipeV: (2p + 1) / 2 (its repository). If the communication of experts
    overlaps compute, Megatron runs one more forward pass before the first backward, which this number includes.
    `deferred` returns the number of micro-batches that are held only for W.
    """
    later, count = pipeline - 1.0 - index, microbatches * np.ones_like(pipeline - index)
    if schedule == "interleaved":
        chunks = 2.0 * later + (virtual - 1.0) * pipeline + 1.0
        count = np.where(virtual > 1, chunks / virtual, later + 1.0)
    elif schedule != "gpipe":
        count = _HELD[schedule](later, pipeline) if schedule in _HELD else later + 1.0
    return np.minimum(np.where(pipeline > 1, count, 1.0), microbatches)


_HELD: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "zb-h2": lambda later, pipeline: 2.0 * later + 1.0,
    "zb-2p": lambda later, pipeline: 2.0 * later + 1.0,
    "zb-v": lambda later, pipeline: pipeline,
    "v-half": lambda later, pipeline: (pipeline + 2.0) // 2.0,
    "v-min": lambda later, pipeline: (pipeline + 4.0) // 3.0,
    "dualpipe": lambda later, pipeline: pipeline + 1.0,
    "dualpipev": lambda later, pipeline: pipeline + 0.5,
}
"""Functions from the number of later stages and the number of all stages to the micro-batches that a stage holds. In
other schedules, a stage holds one for each later stage and one of its own."""


def deferred(
    schedule: str,
    index: FloatArray,
    pipeline: FloatArray,
    microbatches: FloatArray,
    weight_share: FloatArray | float = 0.4,
) -> FloatArray:
    """Return for how many micro-batches stage `index` stores only the inputs of W, at the peak of `in_flight`.

    W needs the inputs of the linear layers and the gradients of their outputs, not the tensors of attention. Stage r
    holds r such micro-batches in ZB-H1 and ZB-1p, and 2r in ZB-H2. In ZB-2p it holds as many as fit in the memory of 2p
    micro-batches, where each counts as `weight_share` (`StageTimes.weight_share`) of one. The V family and DualPipe
    hold 0 at their peak.
    """
    held_count = in_flight(schedule, index, pipeline, np.ones_like(index), microbatches)
    waiting = {"zb-h1": 1.0, "zb-1p": 1.0, "zb-h2": 2.0}.get(schedule, 0.0) * index
    if schedule == "zb-2p":
        waiting = (2.0 * index + 1.0) / weight_share
    return np.minimum(np.where(pipeline > 1, waiting, 0.0), microbatches - held_count)


def _zero_bubble(schedule: str, times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with ZB-H1, ZB-H2, ZB-1p or ZB-2p.

    ZB-H1 and ZB-1p hold p micro-batches, ZB-H2 holds 2p - 1, which is optimal for F = B = W. ZB-2p is planned for the
    middle stage: it runs forwards until the first backward arrives, and W until the other stages are done, each at most
    2p. The plan of ZB-1p replaces it if it is faster.
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


V_HALF = (
    ((0.5, -0.5), (1.5, -1.5), (-0.5, 0.0), 6.0),
    ((1.55, -1.2), (0.45, -0.8), (-0.5, 0.0), 6.0),
    ((1.05, -0.3), (0.45, -1.7), (0.0, 0.0), 5.0),
)
"""Linear forms of filling and draining. Each has a (slope, constant) in p for F, B and W, and messages per (p - 1).

Derived from the published orders for p of 3 to 12 (V-Half: arXiv 2405.15362)."""

V_MIN = (((1.2, -1.2), (1.0, -1.2), (-0.2, 0.0), 6.0), ((1.0, -1.2), (1.2, -1.2), (-0.2, 0.0), 6.0))
"""Linear forms of V-Min in the format of `V_HALF`, also derived from the published orders for p of 3 to 12."""


def zero_bubble_v(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the longest time from the first to the last pass of a device in ZB-V, with memory for p micro-batches.

    Source: arXiv 2401.10241, section 6. A device cannot end before its last B has reached the first device. Up to
    2p deferred parts of W fill that time. If forward and backward differ in length, there are gaps in filling and
    draining. Deviation: 2.5 / 4 / 5%; 10% at m = p.
    """
    forward, backward, weight, latency = _with_sends(times)
    r = np.arange(len(forward))[:, None]
    down, up = _sum_before(forward) / 2.0, _sum_before(backward) / 2.0
    waiting = np.minimum(2.0 * len(forward), 2.0 * m) / 2.0
    deferral = down + up + weight[0] / 2.0 - waiting * weight
    gaps = np.maximum(deferral, 0.0) + np.abs(up - down)
    gaps = gaps + np.where(deferral > 0, 6.0, 4.5) * r * latency
    short = np.maximum(0.0, _sum_before(forward[::-1])[::-1] - (m - 1.0) * forward / 2.0)
    busy = m * (forward + backward + weight)
    span: FloatArray = (busy + np.maximum(gaps, short)).max(axis=0)
    return span


def v_half(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with V-Half (arXiv 2405.15362), which needs half of the memory of 1F1B.

    The limited memory delays steps unless W + 2B >= 2F >= 2B - W. Deviation: 3 / 4 / 3.5%; 11% for two devices.
    """
    forward, backward, weight, latency = _with_sends(times)
    p, work = len(forward), forward + backward + weight
    covered: FloatArray = p / 2.0 - (p / 2.0 - 1.5) * np.arange(p, dtype=np.float64)[:, None] / (p - 1.0)
    f, b, w = (x.mean(axis=0) for x in (forward, backward, weight))
    filling = _fill_and_drain(V_HALF, forward, backward, weight, latency) - (0.5 * (f + b + w) if p % 2 == 0 else 0.0)
    busy = _with_gaps(m * work, work, np.maximum(filling, 0.0), covered)
    turn = 2.0 * m * latency + 4.0 * p * latency
    slow_backward = m * (2.0 * b + w / 2.0) + p * f + (p - 2.5) * b - 0.2 * (p - 1.0) * w + turn
    slow_forward = m * (2.0 * f + w / 2.0) + (2.0 * p - 2.5) * b + 0.5 * w + turn
    longest: FloatArray = np.maximum(busy, np.maximum(slow_backward, slow_forward))
    return longest


def v_min(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with V-Min (arXiv 2405.15362), which needs a third of the memory of 1F1B.

    Its devices are busy all the time only if F = B = W. Each p / 3 micro-batches take at least the time that one
    micro-batch needs to pass forward, or backward, through all p devices. With two devices, the memory allows slightly
    more. Deviation: 4.5 / 8 / 11.5%.
    """
    forward, backward, weight, latency = _with_sends(times)
    p = len(forward)
    f, b, w = (x.mean(axis=0) for x in (forward, backward, weight))
    reduction = 0.8 * (f + b) if p % 3 == 0 else 0.0
    busy = m * ((forward + backward + weight).max(axis=0) + 2.0 * latency)
    busy = busy + _fill_and_drain(V_MIN, forward, backward, weight, latency) - reduction
    send = 6.0 * (p - 1.0) / p * m * latency
    round_b, round_f = (
        3.0 * x + 1.2 * (y.max(axis=0) - x) + (0.5 * (f + b + w - 3.0 * x) if p == 2 else 0.0)
        for x, y in ((b, backward), (f, forward))
    )
    slow_backward = m * round_b + p * f + (0.9 * p - 3.0) * b + 0.5 * w
    slow_forward = m * round_f - 2.5 * f + 1.85 * p * b + 0.5 * w
    longest: FloatArray = np.maximum(busy, np.maximum(slow_backward, slow_forward) + send)
    return longest


def dualpipe(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with DualPipe (arXiv 2412.19437), for even p and m >= 2p.

    The bubble is that in DualPipe's repository. Half of the micro-batches start at each end of the pipeline. All but p
    + 1 pairs of a forward and a backward overlap. Deviation: 2.5 / 4.5 / 4%.
    """
    paired, serial, weight, backward, latency = _pairs(times, mirrored=True)
    p = len(times.forward)
    unpaired = np.minimum(p + 1.0, m)
    place = np.minimum(np.arange(p), np.arange(p)[::-1])[:, None] / max(p / 2.0 - 1.0, 1.0)
    bubble = (p / 2.0 - 1.0) * (paired + backward - 3.0 * weight).mean(axis=0)
    sends = (m + p - 4.0) * latency
    work = (m - unpaired) * paired + unpaired * serial
    return _with_gaps(work, serial, np.maximum(bubble, 0.0), p * (1.5 - place)) + sends


def dualpipe_v(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with DualPipeV for m >= 2p.

    DualPipeV folds DualPipe so that parameters are not replicated. Deviation: 1.5 / 4.5 / 4%.
    """
    paired, serial, weight, backward, latency = _pairs(times, mirrored=False)
    p = len(times.forward)
    unpaired = np.minimum(p + 0.5, m)
    place = np.arange(p)[:, None] / (p - 1.0)
    bubble = (p - 1.0) / 2.0 * (paired + backward - 3.0 * weight).mean(axis=0)
    sends = (2.0 * (1.0 - 1.0 / p) * m + 2.0 * (p - 2.0)) * latency
    work = (m - unpaired) * paired + unpaired * serial
    return _with_gaps(work, serial, np.maximum(bubble, 0.0), p * (1.5 - place)) + sends


def _with_gaps(work: FloatArray, micro_batch: FloatArray, gaps: FloatArray, covered: FloatArray) -> FloatArray:
    """Return the longest time of a device in seconds: its work plus its gaps.

    `micro_batch` is the time of one micro-batch on each device. A device that is slower than the mean works during part
    of its gaps: it makes up the difference to the mean for `covered` micro-batches.
    """
    remaining = np.clip(gaps - covered * (micro_batch - micro_batch.mean(axis=0)), 0.0, gaps)
    longest: FloatArray = (work + remaining).max(axis=0)
    return longest


def _with_sends(times: StageTimes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return the seconds of the F, B and W passes of each stage, including sends, and the message latency in seconds.

    A micro-batch passes through each device twice, so a device sends it twice per F and per B. The first and the last
    device send it only once.
    """
    forward, backward = times.forward, times.backward_input
    if np.any(times.sending > 0):
        sends = np.full((len(forward), 1), 2.0)
        sends[[0, -1]] = 1.0
        forward, backward = forward + sends * times.sending, backward + sends * times.sending
    return forward, backward, times.backward_weight, times.latency


def _sum_before(stages: FloatArray) -> FloatArray:
    """Return, for each stage, the sum of the values in `stages` over all stages before it."""
    return np.cumsum(stages, axis=0) - stages


def _fill_and_drain(
    forms: tuple[tuple[tuple[float, float], tuple[float, float], tuple[float, float], float], ...],
    forward: FloatArray,
    backward: FloatArray,
    weight: FloatArray,
    latency: FloatArray,
) -> FloatArray:
    """Return the time to fill and drain the pipeline in seconds: the maximum of the linear functions in `forms`. Their
    arguments are the mean times of the passes over all stages."""
    p = float(len(forward))
    means = [x.mean(axis=0) for x in (forward, backward, weight)]
    longest = np.zeros_like(latency)
    for *terms, messages in forms:
        form = messages * (p - 1.0) * latency
        for (slope, constant), mean in zip(terms, means, strict=True):
            form = form + (slope * p + constant) * mean
        longest = np.maximum(longest, form)
    return longest


def _pairs(times: StageTimes, *, mirrored: bool) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return the seconds of each device for overlapped F and B, the passes in series, W, and B + W, and the latency.
    With `mirrored` a device does half of its work for stage r and half for stage p - 1 - r."""
    forward, backward, weight, latency = _with_sends(times)
    serial = forward + backward + weight
    paired = serial if times.paired is None else np.minimum(times.paired, serial)
    device_times = (paired, serial, weight, backward + weight)
    if mirrored:
        device_times = tuple((x + x[::-1]) / 2.0 for x in device_times)  # type: ignore[assignment]
    return *device_times, latency


_V_FORMULAS = {"zb-v": zero_bubble_v, "v-half": v_half, "v-min": v_min, "dualpipe": dualpipe, "dualpipev": dualpipe_v}
