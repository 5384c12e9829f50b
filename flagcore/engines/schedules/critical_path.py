"""The time of a pipeline of uneven stages from its first forward to its last backward, by longest paths.

A path spends the middle of the step on one stage, r. `front` is the time until the first backward of r, `back` the time
after its last forward. Both are running maxima over stages, so the cost does not depend on the number of micro-batches.
Symbols: p stages, m micro-batches, v virtual stages per device; F forward, B and W the backward that makes
the gradient of activations and of weights. All arrays of stages are (stages, candidates).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each stage of pipelines of one length.

    `forward`, `backward_input` (recomputation included), `backward_weight` and `paired` have shape (stages,
    candidates). A stage is the work of one device: all its virtual stages, assumed equal; for DualPipe it is a stage
    of the model, which two devices hold. `paired` is one forward and one backward (both parts) of two micro-batches
    that a schedule overlaps; None: as long as one after the other.

    `send` (candidates,) is one message over one boundary, `blocking` the share of it (0 to 1) during which its
    sender computes nothing; the rest only makes the receiver wait. `weight_share` is how much of a micro-batch's
    activations is held between its two backwards, as the scheduler of `zb-2p` sees it.
    """

    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    send: FloatArray
    blocking: FloatArray | float = 0.0
    weight_share: FloatArray | float = 0.4
    paired: FloatArray | None = None

    @property
    def busy(self) -> FloatArray:
        """Seconds of one micro-batch on each stage, without sends."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def latency(self) -> FloatArray:
        """Seconds of a message during which its sender is not blocked."""
        return self.send * (1.0 - np.asarray(self.blocking, dtype=np.float64))

    @property
    def sending(self) -> FloatArray:
        """Seconds of a message during which its sender is blocked."""
        return self.send * np.asarray(self.blocking, dtype=np.float64)


def gpipe(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of all forwards, then all backwards (arXiv 1811.06965), per candidate. Exact."""
    forward, backward = _with_sends(times, 1.0)
    hops = 2.0 * (len(forward) - 1) * times.latency
    slowest: FloatArray = forward.max(axis=0) + backward.max(axis=0)
    total: FloatArray = forward.sum(axis=0) + backward.sum(axis=0) + (m - 1.0) * slowest + hops
    return total


def one_forward_one_backward(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the time of 1F1B (Narayanan et al. 2021, arXiv 2104.04473).

    Exact where sends block.
    """
    forward, backward = _with_sends(times, 1.0)
    warm = np.minimum(_behind(forward), m - 1.0)
    front, first = _edge(forward, backward, times.latency, warm * np.maximum.accumulate(forward))
    back, last = _edge(backward, forward, times.latency, warm * np.maximum.accumulate(backward))
    steps, both = m - 1.0 - warm, forward + backward
    return _join(front, first, back, last, steps, steps * both)


def interleaved(times: StageTimes, m: FloatArray, v: FloatArray) -> FloatArray:
    """Return the time of interleaved 1F1B in groups of p micro-batches (arXiv 2104.04473).

    A path may also wrap around: the last stage is followed by the next virtual stage of the first one, p passes
    later. With m a multiple of p exact for even stages, within 3.5% for uneven ones; 0.5% more if the head is all in
    the last virtual stage. With v = 1 it is 1F1B.
    """
    plain = one_forward_one_backward(times, m) if np.any(v <= 1.0) else m
    forward, backward = (x / v for x in _with_sends(times, v))
    p, latency, passes = len(forward), times.latency, m * v
    warm = np.minimum(2.0 * _behind(forward) + (v - 1.0) * p, passes - 1.0)
    front, first = _edge(forward, backward, latency, _laps(forward, latency, warm))
    back, last = _edge(backward, forward, latency, _laps(backward, latency, warm))
    steps, both = passes - 1.0 - warm, forward + backward
    total = _join(front, first, back, last, steps, steps * both)
    # From the last stage to the first within the step: worth it where one is slow forward, the other backward.
    shared = steps[-1] - p
    fewest = np.maximum(1.0, warm[0] - p - warm[-1])
    wrap = (shared >= fewest) & (steps[0] >= 1.0)
    for before, after, one in ((front, back, forward), (back, front, backward)):
        for taken in (fewest, shared):
            path = before[-1] + taken * both[-1] + one[0] + latency + (shared - taken) * both[0] + after[0]
            total = np.where(wrap, np.maximum(total, path), total)
    return np.where(v > 1.0, total, plain)


def deferred_weights(
    times: StageTimes, m: FloatArray, warm: FloatArray, delayed: FloatArray, *, barrier: bool
) -> FloatArray:
    """Return the time of a schedule that starts with `warm` forwards and ends with `delayed` gradients of weights.

    Both (stages, candidates): the forwards before a stage's first backward, and the W after its last B. Without
    `barrier` it is the longest span of one stage.

    Deviation from simulation, m >= 2p: ZB-H1 and ZB-H2 within 1%, ZB-1p within 1%, 3% where all stages differ.
    ZB-2p is always below: within 2.5% for even stages, 7.5% for uneven ends, 10.5% where all differ. At m = p ZB-H2
    is at most 10% too fast.
    """
    forward, backward = _with_sends(times, 1.0, fused=False)
    weight, latency, p = times.backward_weight, times.latency, len(forward)
    warm, delayed = np.minimum(warm, m), np.minimum(delayed, m)
    within = np.minimum(warm - 1.0, m - delayed)  # W between the last backwards
    before = m - delayed - within  # W between the first backward and the last forward
    front, first = _edge(forward, backward, latency, (warm - 1.0) * np.maximum.accumulate(forward))
    closing = (warm - 1.0 - within) * np.maximum.accumulate(backward)
    closing = closing + within * np.maximum.accumulate(backward + weight)
    back, last = _edge(backward, forward, latency, closing)
    steps = m - warm
    through = _join(front, first, back, last, steps, steps * (forward + backward) + before * weight) + weight[0]

    start = np.cumsum(forward, axis=0) - forward + np.arange(p)[:, None] * latency
    chain = forward + backward + 2.0 * latency
    round_trip = np.cumsum(chain[::-1], axis=0)[::-1] - chain
    wait = round_trip - (warm - 1.0) * backward - (m - before - 1.0) * weight
    own = front + steps * forward + m * (backward + weight) + np.where(steps >= 1.0, np.maximum(wait, 0.0), 0.0)
    own = np.maximum(own, np.where(steps < 1.0, first + round_trip + backward + weight, 0.0))
    longest: FloatArray = np.maximum(through, (own if barrier else own - start).max(axis=0))
    return longest


def _behind(stages: FloatArray) -> FloatArray:
    """Return the number of stages after each, as a column."""
    column: FloatArray = np.arange(len(stages) - 1.0, -1.0, -1.0)[:, None]
    return column


def _with_sends(times: StageTimes, v: FloatArray | float, *, fused: bool = True) -> tuple[FloatArray, FloatArray]:
    """Return forward and backward with the blocking time of their sends, v per micro-batch.

    The last virtual stage sends nothing forward, the first nothing backward. `fused`: the backward includes W.
    """
    forward, backward = times.forward, times.backward_input
    if fused:
        backward = backward + times.backward_weight
    if np.any(times.sending > 0) and len(forward) > 1:
        forward, backward = forward + v * times.sending, backward + v * times.sending
        forward[-1] -= times.sending
        backward[0] -= times.sending
    return forward, backward


def _edge(
    pass_: FloatArray, other: FloatArray, latency: FloatArray, extra: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the time at which each stage ends its first passes, with and without the way back from the last stage.

    `extra` is the time of the passes after the first one on the slowest stage so far. The end of the step is the
    same in reverse, with the passes exchanged.
    """
    alone = np.cumsum(pass_, axis=0) + np.arange(len(pass_))[:, None] * latency + extra
    reached = alone.copy()
    for r in range(len(pass_) - 2, -1, -1):
        np.maximum(alone[r], reached[r + 1] + latency + other[r + 1], out=reached[r])
    return reached, alone


def _laps(pass_: FloatArray, latency: FloatArray, count: FloatArray) -> FloatArray:
    """Return the time of `count` passes on the slowest stage so far or, after one round over all stages, of all.

    Messages make each round longer: then also of as many rounds as the passes allow.
    """
    p, slowest = len(pass_), np.maximum.accumulate(pass_)
    lap = pass_.sum(axis=0) + p * latency
    longest: FloatArray = np.maximum(count * slowest, np.where(count >= p, lap + (count - p) * slowest[-1], 0.0))
    if np.any(latency > 0):
        laps = np.floor(count / p)
        np.maximum(longest, laps * lap + (count - laps * p) * slowest, out=longest)
    return longest


def _join(
    front: FloatArray, first: FloatArray, back: FloatArray, last: FloatArray, steps: FloatArray, middle: FloatArray
) -> FloatArray:
    """Return the longest path over all stages; a stage without a forward after its first backward has no middle."""
    through = front + middle
    through += back
    short = steps < 1.0
    if np.any(short):
        through = np.where(short, np.maximum(front + last, first + back), through)
    longest: FloatArray = through.max(axis=0)
    return longest
