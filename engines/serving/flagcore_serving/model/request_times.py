"""The latencies of simulated requests, the metrics that follow, and whether these are certain to exceed a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.metrics import PERCENTILES, STATISTICS
from flagcore.domain.space import FloatArray, IntArray
from flagcore_serving.load.figures import statistics_of, widest_limits
from flagcore_serving.load.progress import LimitCheck
from flagcore_serving.model.sequences import Request, SimulatedRun

MAX_REQUEST_TIMES = 20_000
"""Maximum number of requests whose latencies are stored. Of more requests, an evenly spaced sample is stored."""

OVERLOAD_GROWTH = 0.02
"""An open loop is overloaded if its waits grow by more than this share of the time between two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Latencies of sampled requests in seconds, and totals over all requests.

    - `tpot`: NaN for answers of one token.
    - `gaps`: as in `SimulatedRun`.
    - `sent`: the times at which requests were sent.
    - `input_len`, `output_len`: mean numbers of tokens of all requests.
    - `count`: the number of all requests.
    - `seconds`: the time from the first to the last request.
    """

    ttft: FloatArray
    e2e: FloatArray
    tpot: FloatArray
    gaps: list[tuple[float, int]]
    sent: FloatArray
    input_len: float
    output_len: float
    count: int
    seconds: float

    @classmethod
    def from_outcome(cls, outcome: SimulatedRun) -> RequestTimes:
        requests = outcome.requests
        columns = (  # not by name, which is slow where requests are compiled
            [each.prompt for each in requests],
            [each.output for each in requests],
            [each.arrival for each in requests],
            [each.first for each in requests],
            [each.end for each in requests],
        )
        prompts, outputs, sent, first, end = (np.fromiter(column, np.float64, len(column)) for column in columns)
        return cls(
            ttft=first - sent,
            e2e=end - sent,
            tpot=np.divide(end - first, outputs - 1.0, out=np.full(sent.shape, np.nan), where=outputs > 1.0),
            gaps=outcome.gaps,
            sent=sent,
            input_len=float(prompts.mean()),
            output_len=float(outputs.mean()),
            count=sent.size,
            seconds=outcome.duration,
        )

    def endless(self, simulated: int, flight: int, first: int, last: int) -> RequestTimes:
        """Return the request times in an endless load with `flight` requests in flight, `simulated` of them simulated.

        The `first` and the `last` requests do not count unless there are few others. Rates follow from `flight` and the
        mean duration (Little's law). The requests beyond `simulated` wait.
        """
        rows = slice(first, self.count - last) if self.count > 2 * simulated else slice(None)
        ttft, e2e, tpot = self.ttft[rows], self.e2e[rows], self.tpot[rows]
        seconds = float(e2e.sum()) / simulated
        wait = (flight - simulated) * seconds / e2e.size
        return replace(self, ttft=ttft + wait, e2e=e2e + wait, tpot=tpot, count=e2e.size, seconds=seconds)

    def extrapolate(
        self, input_len: IntArray, output_len: IntArray, simulated: int | None, flight: int, delay: float
    ) -> RequestTimes:
        """Return the request times of all requests with these lengths, of which only the first ones were simulated.

        The other requests repeat the simulated ones, without those at both ends. In a closed loop with `flight`
        requests in flight, the requests beyond `simulated` wait, and the first wave starts `delay` seconds later. If
        `simulated` is None, the loop is open; if it is overloaded, each request waits longer than the one before.
        """
        count, sample, ends = input_len.size, self.count, simulated or 0
        low, high = max(sample // 4, ends), sample - max(sample // 4, ends)
        index = np.unique(np.linspace(0, count - 1, min(count, MAX_REQUEST_TIMES)).astype(np.int64))
        source = np.where(index < low, index, low + index % (high - low))
        if simulated is not None:
            gap = float(self.e2e[low:high].mean()) / simulated  # mean time between two ends (Little's law)
            wait = np.clip(np.minimum(index, flight) - simulated, 0, None) * gap + delay * (index < flight)
            seconds = self.seconds + (count - sample) * gap + delay
        else:
            quarters = self.ttft[: 4 * (sample // 4)].reshape(4, -1).mean(axis=1)
            interval = float(self.sent[-1]) / max(sample - 1, 1)
            gap = float(quarters[3] - quarters[1]) / (sample // 2)
            gap = gap if gap > OVERLOAD_GROWTH * interval else 0.0
            wait = (index - source) * gap
            seconds = self.seconds + (count - sample) * (interval + gap)
        return replace(
            self,
            ttft=self.ttft[source] + wait,
            e2e=self.e2e[source] + wait,
            tpot=self.tpot[source],
            input_len=float(input_len.mean()),
            output_len=float(output_len.mean()),
            count=count,
            seconds=seconds,
        )


class SimulationCheck:
    """Detects that a simulation is certain to exceed one of the `limits` of an SLO. `requests`: by arrival."""

    def __init__(self, limits: Mapping[str, float], requests: Sequence[Request]) -> None:
        self._check, self._coming, self._open = LimitCheck(limits, len(requests)), deque(requests), list[Request]()

    def has_failed(self, now: float) -> bool:
        """Return whether the requests that were sent by `now` exceed a limit for certain."""
        while self._coming and self._coming[0].arrival <= now:
            self._open.append(self._coming.popleft())
        if ended := [each for each in self._open if each.end >= 0.0]:
            self._open = [each for each in self._open if each.end < 0.0]
            ttft_s, tpot_s = [each.ttft_s for each in ended], [each.tpot_s for each in ended]
            self._check.add({"ttft_s": ttft_s, "tpot_s": tpot_s, "e2e_s": [each.e2e_s for each in ended]})
        decoding = (each for each in self._open if each.first >= 0.0 and each.output > 1)
        waits_s = {
            "ttft_s": [(now if each.first < 0.0 else each.first) - each.arrival for each in self._open],
            "tpot_s": [(now - each.first) / (each.output - 1.0) for each in decoding],
            "e2e_s": [now - each.arrival for each in self._open],
        }
        return self._check.is_exceeded(waits_s)


def figures_of(times: RequestTimes, lanes: float, slo: Mapping[str, float]) -> dict[str, float]:
    """Return rates and statistics of latencies by name, as `flagcore_serving.load.figures` defines them."""
    rate = lanes * times.count / max(times.seconds, 1e-9)
    has_tpot, widest = ~np.isnan(times.tpot), widest_limits(slo)
    by_request = {"ttft_s": times.ttft, "tpot_s": np.nan_to_num(times.tpot), "e2e_s": times.e2e}
    good_share = np.all([by_request[name] <= widest[name] for name in by_request.keys() & widest], axis=0).mean()
    figures = {
        "output_tokens_per_s": times.output_len * rate,
        "total_tokens_per_s": (times.input_len + times.output_len) * rate,
        "requests_per_s": rate,
        "goodput_requests_per_s": float(good_share) * rate,
    }
    for name, values, weights in (
        ("ttft_s", times.ttft, None),
        ("tpot_s", times.tpot[has_tpot], None),
        ("itl_s", np.array([gap for gap, _ in times.gaps]), np.array([float(count) for _, count in times.gaps])),
        ("e2e_s", times.e2e, None),
    ):
        figures |= {f"{name}.{statistic}": value for statistic, value in _statistics(values, weights).items()}
    return figures


def _statistics(values: FloatArray, weights: FloatArray | None) -> dict[str, float]:
    """Return mean and percentiles. All are 0 if there are no values, such as for the ITL of one-token answers."""
    if not values.size:
        return dict.fromkeys(STATISTICS, 0.0)
    if weights is None:
        return statistics_of(values)
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    shares = np.array(PERCENTILES) / 100.0
    indices = np.minimum(np.searchsorted(cumulative, shares * cumulative[-1]), values.size - 1)
    mean = (values * weights).sum() / weights.sum()
    return dict(zip(STATISTICS, map(float, (mean, *values[order][indices])), strict=True))
