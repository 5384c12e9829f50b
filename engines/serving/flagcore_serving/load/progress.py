"""Decides whether a load can end before all its requests are answered, and searches for the highest load."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from statistics import fmean
from typing import Protocol

import numpy as np

from flagcore_serving.load.figures import BATCHES, SteadyState, Window, cut, mean_error
from flagcore_serving.load.result import Answer, MinRate, Progress
from flagcore_serving.load.stream import Stream

RESOLUTION = 1.05
"""The search ends once a load above the limits is at most this factor higher than a load within them."""
GROWTH = RESOLUTION**4
"""The first factor between two loads, which two bisections reduce to RESOLUTION. The factor is squared after each load,
until one load is within the limits and one is not."""
MAX_GROWTH = RESOLUTION**32
FAR_HEADROOM, MAX_HEADROOM = 2.0, 3.0
"""From FAR_HEADROOM on, the factor between two loads is the headroom of the first load, at most MAX_HEADROOM."""
MIN_RATE = 0.01
"""The lowest request rate of a search, in requests per second."""


class Verdict(Enum):
    """What is known about a load: that it met the limits, that it exceeded one, or that it had no time."""

    MET = "met"
    EXCEEDED = "exceeded"
    UNTESTED = "untested"


def highest_load(
    test: Callable[[float], Verdict],
    start: float,
    *,
    minimum: float,
    maximum: float,
    is_integer: bool = False,
    capacity: Callable[[], float] = lambda: math.inf,
    headroom: Callable[[], float] = lambda: 1.0,
    growth: float = GROWTH,
) -> float | None:
    """Return the highest load from `minimum` to `maximum` that meets the limits, precise to RESOLUTION.

    Returns None if no load meets them. If loads are untested, a higher load may meet them.

    - `test`: called for one load after the other, first for `start`. After an untested load, only higher loads are
      tested, because their requests arrive in less time.
    - `is_integer`: whether loads are integers.
    - `capacity`: called after a load above the limits; returns an upper bound of the highest load.
    - `headroom`: called after a load within the limits; returns the smallest ratio of a limit to the measured metric.
      Far from the limit, the next load is higher by this ratio, and otherwise by at least its square root, because
      latencies grow faster than the load near the limit, and more slowly below it.
    - `growth`: the first factor between two loads.
    """
    passed, low, failed, factor, load = 0.0, 0.0, math.inf, growth, min(max(start, minimum), maximum)
    while True:
        # `low`: the highest load below `failed` that met the limits or is untested
        load = min(max(float(round(load)), low + 1), failed - 1) if is_integer else load
        match test(load):
            case Verdict.MET:
                passed = low = load
            case Verdict.EXCEEDED:
                failed = load
            case Verdict.UNTESTED:
                low = load
        is_bracketed = low > 0.0 and failed <= max(low * RESOLUTION * (1 + 1e-9), low + is_integer)
        is_beyond_headroom = low > passed and failed == math.inf and low >= passed * min(headroom(), MAX_HEADROOM)
        if low == maximum or failed == minimum or is_bracketed or is_beyond_headroom:
            return passed or None
        if low > passed:
            load = min(math.sqrt(low * failed) if failed < math.inf else low * GROWTH, maximum)
        elif passed:  # the load above the limits may be far too high, so it does not hasten the growth
            room = headroom()
            growth = min(room if room >= FAR_HEADROOM else math.sqrt(room), MAX_HEADROOM)
            load = min(math.sqrt(passed * failed), passed * max(factor, growth), maximum)
        else:
            load = max(min(failed / factor, capacity()), minimum)
        factor = min(factor * factor, MAX_GROWTH)


def completions_per_s(answers: Sequence[Answer]) -> float:
    """Return the answers per second from the first to the last completed answer, or infinity if it is undefined.

    For an overloaded server, it is the highest rate that the server sustains.
    """
    ends = sorted(answer.end_s for answer in answers)
    return (len(ends) - 1) / (ends[-1] - ends[0]) if ends and ends[-1] > ends[0] else math.inf


class Latencies(Protocol):
    """The latencies of an answer in seconds."""

    @property
    def ttft_s(self) -> float: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def e2e_s(self) -> float: ...


class LimitCheck:
    """Detects that a load is certain to exceed a limit, even if all remaining answers are fast.

    `limits`: seconds by metric; limits on ITL are not checked. `count`: the number of requests of the load.
    """

    def __init__(self, limits: Mapping[str, float], count: int) -> None:
        self._count, self._sums, self._slower = count, defaultdict[str, float](float), Counter[str]()
        self._limits: list[tuple[str, str, float, int]] = []
        for figure, limit in limits.items():
            name, _, statistic = figure.partition(".")
            share = 0.0 if statistic == "mean" else (count - 1) * float(statistic.removeprefix("p")) / 100
            if name != "itl_s":
                self._limits.append((name, "" if statistic == "mean" else figure, limit, count - math.floor(share)))

    def add(self, seconds: Mapping[str, Sequence[float]]) -> None:
        """Count answers. `seconds`: their latencies by metric."""
        for name, percentile, limit, _ in self._limits:
            if percentile:
                self._slower[percentile] += sum(each > limit for each in seconds[name])
            else:
                self._sums[name] = sum(seconds[name], self._sums[name])

    def exceeded(self, answer: Latencies) -> bool:
        """Count an answer, and return whether the load is now certain to exceed one of the limits."""
        self.add({name: (getattr(answer, name) or 0.0,) for name, *_ in self._limits})
        return self.is_exceeded({})

    def is_exceeded(self, waits_s: Mapping[str, Sequence[float]]) -> bool:
        """Return whether a limit is exceeded even if all remaining values are 0.

        `waits_s`: lower bounds of the latencies of unanswered requests in seconds, by metric.
        A percentile lies between two values; the lower one must exceed the limit.
        """
        for name, percentile, limit, enough in self._limits:
            waits = waits_s.get(name, ())
            if not percentile:
                if self._sums[name] + sum(waits) > limit * self._count:
                    return True
            elif len(waits) >= enough - self._slower[percentile] <= sum(wait > limit for wait in waits):
                return True
        return False


MIN_TIMED, NEXT_CHECK = 20, 1.1
"""The minimum number of answers from which a rate is estimated, and their growth until the next estimate."""


class RateCheck:
    """Detects that the rate of a closed loop is below `rate` with a probability of 97.5%.

    It needs the first wave of `flight` answers, which does not count, another wave, and a quarter of `count` answers.
    """

    def __init__(self, rate: MinRate, flight: int, count: int) -> None:
        self._rate, self._flight = rate, flight
        self._next: float = max(flight + max(flight, MIN_TIMED), count / 4)

    def is_below(self, answers: Sequence[Answer]) -> bool:
        """Return whether the rate of `answers`, which are sorted by their ends, is very likely too low."""
        if len(answers) < self._next:
            return False
        self._next = NEXT_CHECK * len(answers)
        ends = np.array([answer.end_s for answer in answers[self._flight - 1 :]])
        work = np.array([self._work(answer) for answer in answers[self._flight :]], dtype=float)
        # whole batches, because the times between single answers say nothing if answers end together
        parts = zip(np.array_split(np.diff(ends), BATCHES), np.array_split(work, BATCHES), strict=True)
        per_unit = np.array([times.sum() / units.sum() for times, units in parts])
        return bool(per_unit.mean() * (1.0 - mean_error(per_unit)) * self._rate.minimum > 1.0)

    def _work(self, answer: Answer) -> int:
        if self._rate.name == "requests_per_s":
            return 1
        return answer.output_tokens + (answer.input_tokens if self._rate.name == "total_tokens_per_s" else 0)


SURE = 2.0
"""A load is stopped if it is estimated to take more than this multiple of its time limit."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a load.

    - `input_tokens`: tokens of the prompt; 0 for a prompt that is text, because the server counts its tokens.
    - `arrive_s`: when to send it, in seconds after the start of the load; None in a closed loop.
    - `task`, `turn`: the number of its conversation, and of the request in this conversation, from 0.
    - `wait_s`: seconds from the answer to the turn before until it is sent.
    - `pieces`: the pieces of its prompt for `routing.Prefixes`.
    """

    body: bytes
    input_tokens: int
    output_tokens: int
    arrive_s: float | None
    task: int = 0
    turn: int = 0
    wait_s: float = 0.0
    pieces: tuple[int, ...] = ()


class Watch:
    """Tracks a load: stores its answers and its requests in flight, and decides whether it has ended.

    - `has_ended`: whether the load is certain to exceed one of `limits` (`is_stopped`), is very likely slower than
      `min_rate` (`is_slow`), or has precise metrics.
    - `window`: the window of the requests that count, if the load has a steady state or was cut off; else None.
    - `progress`: the progress of a load that did not end within its time; else None.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Mapping[str, float],
        steady: SteadyState | None = None,
        fewest: int | None = None,
        min_rate: MinRate | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.steady, self._requests, self._check = steady, requests, LimitCheck(limits, len(requests))
        self._outputs = list(accumulate(request.output_tokens for request in requests))
        self._needed = steady.enough if steady else len(requests)
        self._fewest = None if fewest is None else min(fewest, self._needed)
        self._rate = RateCheck(min_rate, concurrency, self._needed) if min_rate and concurrency else None
        self._unanswered = dict[Stream, float]()
        """The requests in flight with the seconds at which they were sent, the oldest first."""
        self.answers: list[Answer] = []
        self.window: Window | None = None
        self.progress: Progress | None = None
        self.is_stopped = self.is_slow = self.has_ended = False
        self.start = self._last_s = 0.0

    def sent(self, stream: Stream) -> None:
        """Record that a request was sent, whose answer is parsed by `stream`."""
        self._unanswered[stream] = time.perf_counter() - self.start

    def answered(self, stream: Stream, answer: Answer) -> None:
        """Store an answer, and check whether the load has ended."""
        del self._unanswered[stream]
        self.answers.append(answer)
        self._last_s = max(self._last_s, answer.start_s)
        self.is_stopped = self._check.exceeded(answer)
        if self.steady is not None:
            self.window = self.steady.reached(self.answers, self._answered_until_s)
        if self.window is None and self._rate is not None and self._rate.is_below(self.answers):
            self.window = cut(self.answers, self._answered_until_s, 1)
            self.is_slow = self.window is not None
        self.has_ended = self.is_stopped or self.window is not None

    def is_too_late(self) -> bool:
        """Return whether the requests in flight have waited for so long that the load is certain to exceed a limit."""
        now_s = time.perf_counter() - self.start
        waits_s = {
            "ttft_s": [now_s - sent_s for stream, sent_s in self._unanswered.items() if not stream.events],
            "e2e_s": [now_s - sent_s for sent_s in self._unanswered.values()],
        }
        self.is_stopped = self.is_stopped or self._check.is_exceeded(waits_s)
        self.has_ended = self.has_ended or self.is_stopped
        return self.is_stopped

    def is_hopeless(self, timeout_s: float) -> bool:
        """Return whether the load is certain to have too few answers for metrics after `timeout_s` seconds.

        In a closed loop, this is unknown before the first answer.
        """
        if self._fewest is None or len(self.answers) >= self._fewest:
            return False
        if arrive_s := self._requests[self._fewest - 1].arrive_s:
            return arrive_s > timeout_s
        return bool(self.answers) and self._estimated_s(self._fewest) > SURE * timeout_s

    def is_cut(self) -> bool:
        """End a load before all its requests are answered, and return whether it has enough answers for metrics."""
        if not self.ends_steadily() and self._fewest is not None:
            self.window = cut(self.answers, self._answered_until_s, self._fewest)
            self.progress = self._progress() if self.window else None
        return self.window is not None

    def ends_steadily(self) -> bool:
        """End a load whose metrics are not yet precise, and return whether it has a steady state."""
        if self.steady is not None and self.window is None and self.answers:
            self.window = self.steady.window(self.answers, self._answered_until_s)
        return self.window is not None

    def time_out(self) -> Progress:
        """End a load that has no metrics, and return its progress."""
        self.progress = self._progress()
        return self.progress

    @property
    def _answered_until_s(self) -> float:
        """The latest time, in seconds after the first send, before which all sent requests are answered. It is at most
        the send time of the last answered request."""
        return next(iter(self._unanswered.values()), self._last_s)

    def _estimated_s(self, count: int) -> float:
        """Estimate the seconds from the first send until the first `count` requests are answered. The estimate is 0 if
        no token has arrived. An event of an incomplete answer counts as one token."""
        arrived = sum(answer.output_tokens for answer in self.answers)
        arrived += sum(len(stream.times) for stream in self._unanswered)
        return (time.perf_counter() - self.start) * self._outputs[count - 1] / arrived if arrived else 0.0

    def _progress(self) -> Progress:
        each_s = fmean(answer.e2e_s for answer in self.answers) if self.answers else None
        estimated_s = self._estimated_s(self._needed)
        all_s = max(self._requests[self._needed - 1].arrive_s or 0.0, estimated_s)
        return Progress(
            answered=len(self.answers),
            requests=self._needed,
            seconds=time.perf_counter() - self.start,
            each_s=each_s,
            has_tokens=estimated_s > 0.0,
            all_s=(all_s or None) if self._fewest is not None else None,
        )
