"""The time of a pipeline with uneven stages, from its first forward to its last backward, as the longest path.

Each path passes the steady state of the step on one stage, r. `front` is the time until the first backward of r, `back`
the time after its last forward. Both are running maxima over stages, so the run time of these functions does not depend
on the number of micro-batches. Symbols: p stages, m micro-batches, v virtual stages per device; F is a forward pass, B
the backward for the gradients of activations, W the backward for the gradients of weights. All arrays of stages have
the shape (stages, candidates).
"""

from typing import NamedTuple

import numpy as np

from flagcore.domain.space import FloatArray


class StageTimes(NamedTuple):
    """The times of one micro-batch on each stage, in seconds; all candidates have pipelines of the same length.

    `forward`, `backward_input` (including recompute), `backward_weight` and `paired` have the shape (stages,
    candidates). A stage is the work of one device over all its virtual stages, which are assumed to be equal. For
    DualPipe, it is a stage of the model, which two devices hold. `paired` is the time of a forward and a backward of
    two micro-batches that overlap; if it is None, they take the sum of both times.

    `send`, of shape (candidates,), is the time of one message. `blocking` is the share of this time (0 to 1) that
    blocks the sender; the rest only delays the receiver. `weight_share` is the share of a micro-batch's activations
    that is held between B and W, as in the scheduler of `zb-2p`.
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
        """The seconds of forward and backward of one micro-batch on each stage, without sends."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def latency(self) -> FloatArray:
        """The part of the message time that does not block the sender, in seconds."""
        return self.send * (1.0 - np.asarray(self.blocking, dtype=np.float64))

    @property
    def sending(self) -> FloatArray:
        """The part of the message time that blocks the sender, in seconds."""
        return self.send * np.asarray(self.blocking, dtype=np.float64)


def gpipe(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with GPipe: all forwards, then all backwards (arXiv 1811.06965). Exact."""
    forward, backward = _with_sends(times, 1.0)
    hops = 2.0 * (len(forward) - 1) * times.latency
    slowest: FloatArray = forward.max(axis=0) + backward.max(axis=0)
    total: FloatArray = forward.sum(axis=0) + backward.sum(axis=0) + (m - 1.0) * slowest + hops
    return total


def one_forward_one_backward(times: StageTimes, m: FloatArray) -> FloatArray:
    """Return the step time in seconds with 1F1B (Narayanan et al. 2021, arXiv 2104.04473). Exact if sends block."""
    forward, backward = _with_sends(times, 1.0)
    warm = np.minimum(_stages_after(forward), m - 1.0)
    front, first = _end_of_passes(forward, backward, times.latency, warm * _running(np.maximum, forward))
    back, last = _end_of_passes(backward, forward, times.latency, warm * _running(np.maximum, backward))
    steps, round_trip = m - 1.0 - warm, forward + backward
    return _longest_path(front, first, back, last, steps, steps * round_trip)


def interleaved(times: StageTimes, m: FloatArray, v: FloatArray) -> FloatArray:
    """Return the step time in seconds with interleaved 1F1B in groups of p micro-batches (arXiv 2104.04473).

    A path may also wrap around: p passes later, the last stage is followed by the first device's next virtual stage. If
    m is a multiple of p, the formula is exact for even stages and within 3.5% for uneven ones. The error grows by 0.5%
    if only the last virtual stage has the output head. With v = 1 it is 1F1B.
    """
    one_virtual = one_forward_one_backward(times, m) if np.any(v <= 1.0) else m
    forward, backward = (x / v for x in _with_sends(times, v))
    p, latency, passes = len(forward), times.latency, m * v
    warm = np.minimum(2.0 * _stages_after(forward) + (v - 1.0) * p, passes - 1.0)
    front, first = _end_of_passes(forward, backward, latency, _pass_rounds(forward, latency, warm))
    back, last = _end_of_passes(backward, forward, latency, _pass_rounds(backward, latency, warm))
    steps, round_trip = passes - 1.0 - warm, forward + backward
    total = _longest_path(front, first, back, last, steps, steps * round_trip)
    # The longest path may run from the last stage to the first: if one is slow forward and the other is slow backward.
    shared = steps[-1] - p
    min_steps = np.maximum(1.0, warm[0] - p - warm[-1])
    wrap = (shared >= min_steps) & (steps[0] >= 1.0)
    for start, end, pass_ in ((front, back, forward), (back, front, backward)):
        for steps_last in (min_steps, shared):
            steps_first = shared - steps_last
            path = start[-1] + steps_last * round_trip[-1] + pass_[0] + latency + steps_first * round_trip[0] + end[0]
            total = np.where(wrap, np.maximum(total, path), total)
    return np.where(v > 1.0, total, one_virtual)


def deferred_weights(
    times: StageTimes, m: FloatArray, warm: FloatArray, delayed: FloatArray, *, barrier: bool
) -> FloatArray:
    """Return the step time in seconds with a schedule that defers W, the gradients of weights, to fill the bubble.

    `warm` is the number of F passes before a stage's first B pass, `delayed` the number of W passes after its last B
    pass. Both have the shape (stages, candidates). With `barrier`, the step lasts from the first pass of any stage to
    the last pass of any stage. Without it, the result is the longest time between the first and the last pass of one
    stage.

    Deviation from simulation for m >= 2p: ZB-H1 and ZB-H2 within 1%, ZB-1p within 1%, or 3% if all stages differ. ZB-2p
    is always underestimated: within 2.5% for even stages, 7.5% for uneven ends, 10.5% if all stages differ. At m = p
    ZB-H2 is underestimated by at most 10%.
    """
    forward, backward = _with_sends(times, 1.0, with_w=False)
    weight, latency, p = times.backward_weight, times.latency, len(forward)
    warm, delayed = np.minimum(warm, m), np.minimum(delayed, m)
    within = np.minimum(warm - 1.0, m - delayed)  # number of W passes between the last B passes
    before = m - delayed - within  # number of W passes between the first B and the last F pass
    front, first = _end_of_passes(forward, backward, latency, (warm - 1.0) * _running(np.maximum, forward))
    closing = (warm - 1.0 - within) * _running(np.maximum, backward)
    closing = closing + within * _running(np.maximum, backward + weight)
    back, last = _end_of_passes(backward, forward, latency, closing)
    steps = m - warm
    path = _longest_path(front, first, back, last, steps, steps * (forward + backward) + before * weight) + weight[0]

    start = _running(np.add, forward) - forward + np.arange(p)[:, None] * latency
    chain = forward + backward + 2.0 * latency
    round_trip = _running(np.add, chain[::-1])[::-1] - chain
    wait = round_trip - (warm - 1.0) * backward - (m - before - 1.0) * weight
    span = front + steps * forward + m * (backward + weight) + np.where(steps >= 1.0, np.maximum(wait, 0.0), 0.0)
    span = np.maximum(span, np.where(steps < 1.0, first + round_trip + backward + weight, 0.0))
    longest: FloatArray = np.maximum(path, (span if barrier else span - start).max(axis=0))
    return longest


def _running(function: np.ufunc, stages: FloatArray) -> FloatArray:
    """Return `function.accumulate(stages)`, row by row: numpy is slow along the first axis."""
    result = np.empty_like(stages)
    result[0] = stages[0]
    for before, stage, accumulated in zip(result, stages[1:], result[1:], strict=False):
        function(before, stage, out=accumulated)
    return result


def _stages_after(stages: FloatArray) -> FloatArray:
    """Return the number of stages after each stage, as a column."""
    return np.arange(len(stages) - 1.0, -1.0, -1.0)[:, None]


def _with_sends(times: StageTimes, v: FloatArray | float, *, with_w: bool = True) -> tuple[FloatArray, FloatArray]:
    """Return the forward and backward time of each stage in seconds, including the time that sends block the stage.

    A micro-batch has v sends in each direction, one fewer forward on the last stage and one fewer backward on the first
    one. `with_w` adds W to the backward.
    """
    forward, backward = times.forward, times.backward_input
    if with_w:
        backward = backward + times.backward_weight
    if np.any(times.sending > 0) and len(forward) > 1:
        forward, backward = forward + v * times.sending, backward + v * times.sending
        forward[-1] -= times.sending
        backward[0] -= times.sending
    return forward, backward


def _end_of_passes(
    pass_: FloatArray, other: FloatArray, latency: FloatArray, extra: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the time at which each stage ends its first passes, in seconds after the start of the step.

    The first array includes paths that return from the last stage, the second excludes them. `pass_` and `other` are
    the times of a pass in this direction and in the other one. `extra` is the time of the passes after the first one on
    the slowest stage so far. If forward and backward are exchanged, the result is the time from a stage's last passes
    to the end of the step.
    """
    without_return = _running(np.add, pass_) + np.arange(len(pass_))[:, None] * latency + extra
    end = without_return.copy()
    for r in range(len(pass_) - 2, -1, -1):
        np.maximum(without_return[r], end[r + 1] + latency + other[r + 1], out=end[r])
    return end, without_return


def _pass_rounds(pass_: FloatArray, latency: FloatArray, count: FloatArray) -> FloatArray:
    """Return the time of `count` passes on the slowest path, in seconds.

    Either all passes are on the slowest stage so far, or one round goes over all stages and the other passes are on the
    slowest of all stages. With latency, paths with as many rounds over all stages as possible are considered, too.
    """
    p, slowest = len(pass_), _running(np.maximum, pass_)
    round_ = pass_.sum(axis=0) + p * latency
    longest: FloatArray = np.maximum(count * slowest, np.where(count >= p, round_ + (count - p) * slowest[-1], 0.0))
    if np.any(latency > 0):
        rounds = np.floor(count / p)
        np.maximum(longest, rounds * round_ + (count - rounds * p) * slowest, out=longest)
    return longest


def _longest_path(
    front: FloatArray, first: FloatArray, back: FloatArray, last: FloatArray, steps: FloatArray, middle: FloatArray
) -> FloatArray:
    """Return the time of the longest path over all stages in seconds. Stages with `steps` below 1 ignore `middle`."""
    path = front + middle
    path += back
    short = steps < 1.0
    if np.any(short):
        path = np.where(short, np.maximum(front + last, first + back), path)
    longest: FloatArray = path.max(axis=0)
    return longest
