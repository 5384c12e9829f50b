"""Decides whether a load can end before all its requests are answered, and searches for the highest load."""

import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from flagcore.engines.serving.load.figures import SteadyState, Window, cut
from flagcore.engines.serving.load.result import Answer, Progress
from flagcore.engines.serving.load.stream import Stream

RESOLUTION = 1.05
"""The search ends once a load above the limits is at most this factor higher than a load within them."""
GROWTH = RESOLUTION**4
"""The first factor between two loads, which two bisections reduce to RESOLUTION. The factor is squared after each load,
until one load is within the limits and one is not."""
MAX_GROWTH = RESOLUTION**32
MAX_HEADROOM = 3.0
"""The highest factor between two loads that the headroom of the first one can cause."""
MIN_RATE = 0.01
"""The lowest request rate of a search, in requests per second."""


def highest_load(
    meets_limits: Callable[[float], bool],
    start: float,
    *,
    minimum: float,
    maximum: float,
    is_integer: bool = False,
    capacity: Callable[[], float] = lambda: math.inf,
    headroom: Callable[[], float] = lambda: 1.0,
) -> float | None:
    """Return the highest load from `minimum` to `maximum` that meets the limits, precise to RESOLUTION.

    Returns None if no load meets them.

    - `meets_limits`: called for one load after the other, first for `start`.
    - `is_integer`: whether loads are integers.
    - `capacity`: called after a load above the limits; returns an upper bound of the highest load.
    - `headroom`: called after a load within the limits; returns the smallest ratio of a limit to the measured metric.
      The next load is higher by at least the square root of this ratio, because latencies grow faster than the load
      near the limit, and more slowly below it.
    """
    passed, failed, factor, load = 0.0, math.inf, GROWTH, min(max(start, minimum), maximum)
    while True:
        load = min(max(float(round(load)), passed + 1), failed - 1) if is_integer else load
        if meets_limits(load):
            passed = load
        else:
            failed = load
        if passed == maximum or failed == minimum or is_bracketed(passed, failed, is_integer):
            return passed or None
        if passed and failed < math.inf:
            load = math.sqrt(passed * failed)
        elif passed:
            load = min(passed * max(factor, min(math.sqrt(headroom()), MAX_HEADROOM)), maximum)
        else:
            load = max(min(failed / factor, capacity()), minimum)
        factor = min(factor * factor, MAX_GROWTH)


def is_bracketed(passed: float, failed: float, is_integer: bool) -> bool:
    """Return whether a load that met the limits and one that did not are so close that the search can end."""
    return passed > 0.0 and failed <= max(passed * RESOLUTION * (1 + 1e-9), passed + is_integer)


def completions_per_s(answers: Sequence[Answer]) -> float:
    """Return the answers per second between the first and the last end, infinity if the ends do not determine it.

    For an overloaded server, it is the highest rate that the server sustains.
    """
    ends = sorted(answer.end_s for answer in answers)
    return (len(ends) - 1) / (ends[-1] - ends[0]) if ends and ends[-1] > ends[0] else math.inf


class LimitCheck:
    """Detects that a load is certain to exceed a limit, even if all remaining answers are fast.

    `limits`: seconds by metric; limits on ITL are not checked. `count`: the number of requests of the load.
    """

    def __init__(self, limits: Mapping[str, float], count: int) -> None:
        checked = {name: limit for name, limit in limits.items() if not name.startswith("itl_s")}
        self._limits = {(name.partition(".")[0], name.partition(".")[2]): limit for name, limit in checked.items()}
        self._count = count
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._slower: Counter[tuple[str, str]] = Counter()

    def exceeded(self, answer: Answer) -> bool:
        """Add an answer, and return whether some limit is now certain to be exceeded."""
        for name in {name for name, _ in self._limits}:
            self._sums[name] += getattr(answer, name) or 0.0
        for figure, limit in self._limits.items():
            self._slower[figure] += (getattr(answer, figure[0]) or 0.0) > limit
        return any(self._is_exceeded(*figure, limit) for figure, limit in self._limits.items())

    def _is_exceeded(self, name: str, statistic: str, limit: float) -> bool:
        """Return whether a statistic is above `limit` even if all remaining values are 0.

        A percentile lies between two values; the lower one must exceed the limit.
        """
        if statistic == "mean":
            return self._sums[name] > limit * self._count
        place = math.floor((self._count - 1) * float(statistic.removeprefix("p")) / 100)
        return self._slower[name, statistic] >= self._count - place


MIN_EVENTS = 2
"""Events per answer, after all answers have begun, that are needed to compute their rate."""
SURE, SURE_BY_EVENTS = 1.5, 4.0
"""A load is given up if it is estimated to take more than this multiple of its time. SURE_BY_EVENTS applies before the
first complete answer: the estimate then counts each event as one token, but an event may contain several tokens, for
example with speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The requests of a load that have a first token, at the time `seconds` after its first send.

    - `count`: the number of these requests.
    - `tokens`: the total number of tokens of their answers.
    - `first_s`: the time of the very first token, in seconds after the first send.
    - `left`: the number of their events that have not arrived yet.
    - `events_per_s`: the rate of events since all of them have begun; 0 if it is not known yet.
    - `waits`: whether some request was sent and has no token yet.
    - `answered`: the number of complete answers.
    """

    seconds: float
    count: int
    tokens: float
    first_s: float = 0.0
    left: float = 0.0
    events_per_s: float = 0.0
    waits: bool = False
    answered: int = 0

    def guess_s(self, tokens: float) -> float | None:
        """Return `needed_s` or, if it is unknown, an estimate from the events so far. None if there are no events."""
        events = self.tokens - self.left
        return self.needed_s(tokens) or (self.seconds * tokens / events if events else None)

    def needed_s(self, tokens: float) -> float | None:
        """Return the seconds from the first send until requests with `tokens` output tokens are answered.

        None if it is unknown. If requests wait, the estimate follows from the rate at which requests began. The time
        before the first token is left out, because it may include initializations of the server. If no request waits,
        it follows from the time at which all requests in flight will end.
        """
        if self.waits:
            if not self.answered or self.count < 2:
                return None
            one = self.tokens / self.count
            return self.seconds + (self.seconds - self.first_s) * max(0.0, tokens - self.tokens) / (self.tokens - one)
        if not self.count or (self.left and not self.events_per_s):
            return None
        end_s = self.seconds + (self.left / self.events_per_s if self.left else 0.0)
        return end_s * max(1.0, tokens / self.tokens)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a load.

    - `input_tokens`: tokens of the prompt; 0 for a text, whose tokens the server counts.
    - `arrive_s`: when to send it, in seconds after the start of the load; None in a closed loop.
    - `follows`: whether it continues the conversation of the request before it. It is then sent when that one is
      answered and the load's think time has passed.
    - `pieces`: the pieces of its prompt for `routing.Prefixes`.
    """

    body: bytes
    input_tokens: int
    output_tokens: int
    arrive_s: float | None
    follows: bool = False
    pieces: tuple[int, ...] = ()


class Watch:
    """Follows a load: stores its answers and its requests in flight, and decides whether it has ended.

    - `has_ended`: whether the load is certain to exceed one of `limits` (`is_stopped`) or its metrics are precise.
    - `window`: the time whose requests count, if the load has a steady state or was cut off.
    - `progress`: what the load achieved, if it did not end in its time.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Mapping[str, float],
        steady: SteadyState | None = None,
        fewest: int | None = None,
    ) -> None:
        self.steady, self._requests, self._check = steady, requests, LimitCheck(limits, len(requests))
        self._outputs = list(accumulate(request.output_tokens for request in requests))
        self._needed = steady.enough if steady else len(requests)
        self._fewest = None if fewest is None else min(fewest, self._needed)
        self._unanswered = dict[Stream, float]()
        """The requests in flight with the seconds at which they were sent, the oldest first."""
        self.answers: list[Answer] = []
        self.window: Window | None = None
        self.progress: Progress | None = None
        self.is_stopped = self.has_ended = False
        self.start = self._last_s = 0.0

    def sent(self, stream: Stream) -> None:
        """Store that a request was sent. Its answer goes to `stream`."""
        self._unanswered[stream] = time.perf_counter() - self.start

    def answered(self, stream: Stream, answer: Answer) -> None:
        """Store an answer, and check whether the load has ended."""
        del self._unanswered[stream]
        self.answers.append(answer)
        self._last_s = max(self._last_s, answer.start_s)
        self.is_stopped = self._check.exceeded(answer)
        if self.steady is not None:
            self.window = self.steady.reached(self.answers, self._answered_until_s)
        self.has_ended = self.is_stopped or self.window is not None

    def is_hopeless(self, timeout_s: float) -> bool:
        """Return whether the fewest requests that give metrics are certain to take longer than `timeout_s`."""
        if self._fewest is None or len(self.answers) >= self._fewest:
            return False
        if arrive_s := self._requests[self._fewest - 1].arrive_s:
            return arrive_s > timeout_s
        needed_s = self._begun().needed_s(self._outputs[self._fewest - 1])
        return needed_s is not None and needed_s > (SURE if self.answers else SURE_BY_EVENTS) * timeout_s

    def is_cut(self) -> bool:
        """End a load that is not complete, and return whether it has enough answers for metrics."""
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
        """The time, in seconds after the first send, such that all requests sent before it are answered.

        At most the time at which the last answered request was sent.
        """
        return next(iter(self._unanswered.values()), self._last_s)

    def _begun(self) -> Begun:
        now, streams = time.perf_counter(), list(self._unanswered)
        begun = [stream for stream in streams if stream.times]
        firsts = [stream.times[0] - self.start for stream in begun]
        latest = max(firsts, default=0.0) + self.start
        events = sum(len(stream.times) - bisect_right(stream.times, latest) for stream in begun)
        is_known = events >= MIN_EVENTS * len(begun)
        return Begun(
            seconds=now - self.start,
            count=len(begun) + len(self.answers),
            tokens=sum(each.output_tokens for each in self.answers) + sum(each.requested for each in begun),
            first_s=min([*firsts, *(each.start_s + each.ttft_s for each in self.answers)], default=0.0),
            left=sum(max(0.0, each.requested - len(each.times)) for each in begun),
            events_per_s=events / (now - latest) if is_known and begun else 0.0,
            waits=len(begun) < len(streams),
            answered=len(self.answers),
        )

    def _progress(self) -> Progress:
        begun = self._begun()
        each_s = fmean(answer.e2e_s for answer in self.answers) if self.answers else None
        all_s = max(
            self._requests[self._needed - 1].arrive_s or 0.0, begun.guess_s(self._outputs[self._needed - 1]) or 0.0
        )
        return Progress(
            answered=begun.answered,
            requests=self._needed,
            seconds=begun.seconds,
            each_s=each_s,
            has_tokens=begun.count > 0,
            all_s=(all_s or None) if self._fewest is not None else None,
        )
