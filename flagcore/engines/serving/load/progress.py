"""Whether a load can end before all its requests are answered, and the search for the highest load within limits."""

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
"""The first factor between two loads, which two bisections reduce to RESOLUTION. Its exponent doubles until one load is
within the limits and one is not."""
MAX_GROWTH = RESOLUTION**32
MAX_HEADROOM = 3.0
"""The highest factor between two loads because of the headroom of the first."""
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
    """Return the highest load from `minimum` to `maximum` within the limits, up to RESOLUTION; None if there is none.

    `meets_limits` is called for one load after the other, first for `start`. With `is_integer`, loads are integers.
    `capacity` returns an upper bound of the highest load after a load above the limits. `headroom` returns the smallest
    ratio of a limit to its figure after a load within the limits: the next load is higher by at least its square root,
    since latencies grow faster than loads near the limit, and slower below.
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
    """Return whether no load between both needs to be tried."""
    return passed > 0.0 and failed <= max(passed * RESOLUTION * (1 + 1e-9), passed + is_integer)


def completions_per_s(answers: Sequence[Answer]) -> float:
    """Return the rate between the first and the last of the answers' ends, infinity if they do not determine it.

    Of an overloaded server it is the highest rate that the server sustains.
    """
    ends = sorted(answer.end_s for answer in answers)
    return (len(ends) - 1) / (ends[-1] - ends[0]) if ends and ends[-1] > ends[0] else math.inf


class LimitCheck:
    """Counts the answers of a load until a limit is certain to be exceeded, even if all remaining answers are fast.

    `limits` are seconds by figure, `count` is the number of requests. Limits of ITL are not checked.
    """

    def __init__(self, limits: Mapping[str, float], count: int) -> None:
        checked = {name: limit for name, limit in limits.items() if not name.startswith("itl_s")}
        self._limits = {(name.partition(".")[0], name.partition(".")[2]): limit for name, limit in checked.items()}
        self._count = count
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._slower: Counter[tuple[str, str]] = Counter()

    def exceeded(self, answer: Answer) -> bool:
        """Add an answer, and return whether a limit is certain to be exceeded."""
        for name in {name for name, _ in self._limits}:
            self._sums[name] += getattr(answer, name) or 0.0
        for figure, limit in self._limits.items():
            self._slower[figure] += (getattr(answer, figure[0]) or 0.0) > limit
        return any(self._is_exceeded(*figure, limit) for figure, limit in self._limits.items())

    def _is_exceeded(self, name: str, statistic: str, limit: float) -> bool:
        """Return whether a statistic is too high if all remaining values are 0.

        A percentile lies between two values; the lower one must exceed the limit.
        """
        if statistic == "mean":
            return self._sums[name] > limit * self._count
        place = math.floor((self._count - 1) * float(statistic.removeprefix("p")) / 100)
        return self._slower[name, statistic] >= self._count - place


MIN_EVENTS = 2
"""Events of each answer since all have begun that give their rate."""
SURE, SURE_BY_EVENTS = 1.5, 4.0
"""A load is given up if it is estimated to take this multiple of its time. Without a complete answer, the estimate
counts events as tokens, but an event may have several tokens, as with speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The requests with a first token, `seconds` after the first send of a load.

    Their answers have `tokens`; `left` events have not arrived, and `events_per_s` arrive since all have begun (0: not
    known yet). The first of them began after `first_s`. If a request `waits`, it was sent and has no token.
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
        """Return `needed_s` or, if that is unknown, an estimate from the events so far; None without any."""
        events = self.tokens - self.left
        return self.needed_s(tokens) or (self.seconds * tokens / events if events else None)

    def needed_s(self, tokens: float) -> float | None:
        """Return the seconds after the first send in which requests with `tokens` are answered, None if unknown.

        If a request waits, the rate at which requests began counts, without the time of the first one, which may
        include initializations of the server. Else all requests that were sent end first.
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
    """A request; `input_tokens` is 0 for a text, whose tokens the server counts. If it `follows` the one before, it is
    sent the think time of the load after that answer.
    """

    body: bytes
    input_tokens: int
    output_tokens: int
    arrive_s: float | None
    follows: bool = False
    pieces: tuple[int, ...] = ()


class Watch:
    """The answers of a load and its requests in flight, of the `requests`.

    The load `has_ended` when it is certain to exceed one of `limits` (`is_stopped`) or its figures are precise. It
    has a `window` if it has a steady state or was cut off, and `progress` if it did not end in its time.
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
        """The requests in flight and their starts, the oldest first."""
        self.answers: list[Answer] = []
        self.window: Window | None = None
        self.progress: Progress | None = None
        self.is_stopped = self.has_ended = False
        self.start = self._last_s = 0.0

    def sent(self, stream: Stream) -> None:
        """Store that a request was sent whose answer goes to `stream`."""
        self._unanswered[stream] = time.perf_counter() - self.start

    def answered(self, stream: Stream, answer: Answer) -> None:
        """Store an answer, and find out whether the load has ended."""
        del self._unanswered[stream]
        self.answers.append(answer)
        self._last_s = max(self._last_s, answer.start_s)
        self.is_stopped = self._check.exceeded(answer)
        if self.steady is not None:
            self.window = self.steady.reached(self.answers, self._answered_until_s)
        self.has_ended = self.is_stopped or self.window is not None

    def is_hopeless(self, timeout_s: float) -> bool:
        """Return whether the fewest requests with figures are certain to need more time."""
        if self._fewest is None or len(self.answers) >= self._fewest:
            return False
        if arrive_s := self._requests[self._fewest - 1].arrive_s:
            return arrive_s > timeout_s
        needed_s = self._begun().needed_s(self._outputs[self._fewest - 1])
        return needed_s is not None and needed_s > (SURE if self.answers else SURE_BY_EVENTS) * timeout_s

    def is_cut(self) -> bool:
        """End a load that is not complete, and return whether it has figures."""
        if not self.ends_steadily() and self._fewest is not None:
            self.window = cut(self.answers, self._answered_until_s, self._fewest)
            self.progress = self._progress() if self.window else None
        return self.window is not None

    def ends_steadily(self) -> bool:
        """End a load without precise figures, and return whether it has a steady state."""
        if self.steady is not None and self.window is None and self.answers:
            self.window = self.steady.window(self.answers, self._answered_until_s)
        return self.window is not None

    def time_out(self) -> Progress:
        """End a load without figures, and return its progress."""
        self.progress = self._progress()
        return self.progress

    @property
    def _answered_until_s(self) -> float:
        """The time before which all requests that were sent are answered, at most that of the last request."""
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
