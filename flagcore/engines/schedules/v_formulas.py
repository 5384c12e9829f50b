"""The time of a step in schedules with two parts of the model per device: the V family and DualPipe.

Steady state is the slowest device or, with little memory, a round through all devices; filling and draining are
linear in the times, with coefficients taken from the published orders for p of 3 to 12. Symbols as in `critical_path`.
Deviations are the largest from simulated orders, m from 2p to 4p, for even stages / other ends / all different.
"""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.schedules.critical_path import StageTimes

V_HALF = (
    ((0.5, -0.5), (1.5, -1.5), (-0.5, 0.0), 6.0),
    ((1.55, -1.2), (0.45, -0.8), (-0.5, 0.0), 6.0),
    ((1.05, -0.3), (0.45, -1.7), (0.0, 0.0), 5.0),
)
"""Filling and draining at full use: (slope, constant) in p of the seconds of F, B and W, and messages a (p - 1)."""

V_MIN = (
    ((1.2, -1.2), (1.0, -1.2), (-0.2, 0.0), 6.0),
    ((1.0, -1.2), (1.2, -1.2), (-0.2, 0.0), 6.0),
)


def zero_bubble_v(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the longest span of a device in ZB-V (arXiv 2401.10241, section 6), memory limited to p micro-batches.

    A device cannot end before its last B has reached the first device; W fills that time, with up to 2p parts of
    them waiting. Forward and backward of unequal length leave gaps while filling or draining. Deviation 2.5 / 4 / 5%;
    10% at m = p.
    """
    forward, backward, weight, latency = _with_sends(times)
    r = np.arange(len(forward))[:, None]
    down, up = _before(forward) / 2.0, _before(backward) / 2.0
    waiting = np.minimum(2.0 * len(forward), 2.0 * m) / 2.0
    deferral = down + up + weight[0] / 2.0 - waiting * weight
    gaps = np.maximum(deferral, 0.0) + np.abs(up - down)
    gaps = gaps + np.where(deferral > 0, 6.0, 4.5) * r * latency
    short = np.maximum(0.0, _before(forward[::-1])[::-1] - (m - 1.0) * forward / 2.0)
    busy = m * (forward + backward + weight)
    span: FloatArray = (busy + np.maximum(gaps, short)).max(axis=0)
    return span


def v_half(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of V-Half (arXiv 2405.15362). Half the memory delays steps unless W + 2B >= 2F >= 2B - W.

    Deviation 3 / 4 / 3.5%; two devices 11%.
    """
    forward, backward, weight, latency = _with_sends(times)
    p, work = len(forward), forward + backward + weight
    covered: FloatArray = p / 2.0 - (p / 2.0 - 1.5) * np.arange(p, dtype=np.float64)[:, None] / (p - 1.0)
    f, b, w = (x.mean(axis=0) for x in (forward, backward, weight))
    filling = _filling(V_HALF, forward, backward, weight, latency) - (0.5 * (f + b + w) if p % 2 == 0 else 0.0)
    busy = _with_gaps(m * work, work, np.maximum(filling, 0.0), covered)
    turn = 2.0 * m * latency + 4.0 * p * latency
    slow_backward = m * (2.0 * b + w / 2.0) + p * f + (p - 2.5) * b - 0.2 * (p - 1.0) * w + turn
    slow_forward = m * (2.0 * f + w / 2.0) + (2.0 * p - 2.5) * b + 0.5 * w + turn
    longest: FloatArray = np.maximum(busy, np.maximum(slow_backward, slow_forward))
    return longest


def v_min(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of V-Min (arXiv 2405.15362): a third of the memory, so full utilization needs F = B = W.

    With so little memory p / 3 micro-batches take at least the forwards, or the backwards, of all devices; two
    devices have memory for a little more. Deviation 4.5 / 8 / 11.5%.
    """
    forward, backward, weight, latency = _with_sends(times)
    p = len(forward)
    f, b, w = (x.mean(axis=0) for x in (forward, backward, weight))
    less = 0.8 * (f + b) if p % 3 == 0 else 0.0
    busy = m * ((forward + backward + weight).max(axis=0) + 2.0 * latency)
    busy = busy + _filling(V_MIN, forward, backward, weight, latency) - less
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
    """Return the time of DualPipe (arXiv 2412.19437; bubble as in its repository), for even p and m >= 2p.

    Half of the micro-batches enter at each end. All but p + 1 pairs of a forward and a backward run together.
    Deviation 2.5 / 4.5 / 4%.
    """
    together, apart, weight, backward, latency = _pairs(times, mirrored=True)
    p = len(times.forward)
    alone = np.minimum(p + 1.0, m)
    place = np.minimum(np.arange(p), np.arange(p)[::-1])[:, None] / max(p / 2.0 - 1.0, 1.0)
    bubble = (p / 2.0 - 1.0) * (together + backward - 3.0 * weight).mean(axis=0)
    sends = (m + p - 4.0) * latency
    work = (m - alone) * together + alone * apart
    return _with_gaps(work, apart, np.maximum(bubble, 0.0), p * (1.5 - place)) + sends


def dualpipe_v(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of DualPipeV, DualPipe folded so that each device holds its parameters once, for m >= 2p.

    Deviation 1.5 / 4.5 / 4%.
    """
    together, apart, weight, backward, latency = _pairs(times, mirrored=False)
    p = len(times.forward)
    alone = np.minimum(p + 0.5, m)
    place = np.arange(p)[:, None] / (p - 1.0)
    bubble = (p - 1.0) / 2.0 * (together + backward - 3.0 * weight).mean(axis=0)
    sends = (2.0 * (1.0 - 1.0 / p) * m + 2.0 * (p - 2.0)) * latency
    work = (m - alone) * together + alone * apart
    return _with_gaps(work, apart, np.maximum(bubble, 0.0), p * (1.5 - place)) + sends


def _with_gaps(work: FloatArray, each: FloatArray, gaps: FloatArray, covered: FloatArray) -> FloatArray:
    """Return the longest work of a device with its gaps.

    A device slower than the mean (`each`: one micro-batch) has work in part of the gaps, the more the earlier it
    stands: the difference for `covered` micro-batches.
    """
    left = np.clip(gaps - covered * (each - each.mean(axis=0)), 0.0, gaps)
    longest: FloatArray = (work + left).max(axis=0)
    return longest


def _with_sends(times: StageTimes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return F, B, W and the latency; devices send each micro-batch on twice, those at the ends once."""
    forward, backward = times.forward, times.backward_input
    if np.any(times.sending > 0):
        twice = np.full((len(forward), 1), 2.0)
        twice[[0, -1]] = 1.0
        forward, backward = forward + twice * times.sending, backward + twice * times.sending
    return forward, backward, times.backward_weight, times.latency


def _before(stages: FloatArray) -> FloatArray:
    """Return the sum over the stages before each."""
    total: FloatArray = np.cumsum(stages, axis=0) - stages
    return total


def _filling(
    forms: tuple[tuple[tuple[float, float], tuple[float, float], tuple[float, float], float], ...],
    forward: FloatArray,
    backward: FloatArray,
    weight: FloatArray,
    latency: FloatArray,
) -> FloatArray:
    """Return the largest of some linear forms of the mean times."""
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
    """Return, a device: a forward and a backward together, apart, W, the whole backward; and the latency.

    `mirrored`: a device does half of its work for stage r, half for stage p - 1 - r.
    """
    forward, backward, weight, latency = _with_sends(times)
    apart = forward + backward + weight
    together = apart if times.paired is None else np.minimum(times.paired, apart)
    found = (together, apart, weight, backward + weight)
    if mirrored:
        found = tuple((x + x[::-1]) / 2.0 for x in found)  # type: ignore[assignment]
    return *found, latency
