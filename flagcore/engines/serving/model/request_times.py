"""The latencies of simulated requests, and their continuation to a whole load or a steady state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.serving.model.simulation import Outcome

MAX_REQUEST_TIMES = 20_000
"""Maximum number of requests with their own latencies; of more, an evenly spaced sample is kept."""

OVERLOAD_GROWTH = 0.02
"""An open loop is overloaded if its waits grow by more than this share of the time between two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Latencies of a sample of requests in seconds, and totals of all requests.

    `tpot` is NaN for answers of one token; `gaps` has the format of `Outcome.gaps`. `input_len` and `output_len` are
    mean numbers of tokens of the `count` requests, `seconds` is the time from the first to the last.
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
    def from_outcome(cls, outcome: Outcome) -> RequestTimes:
        prompts, outputs, sent, first, end = (
            np.array([getattr(request, name) for request in outcome.requests], dtype=np.float64)
            for name in ("prompt", "output", "arrival", "first", "end")
        )
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

    def endless(self, simulated: int, flight: int, rows: slice) -> RequestTimes:
        """Return the times of `flight` requests in flight; `simulated` of them were simulated, of which `rows` count.

        Rates follow from `flight` and the mean duration (Little's law); the requests beyond `simulated` wait.
        """
        ttft, e2e, tpot = self.ttft[rows], self.e2e[rows], self.tpot[rows]
        seconds = float(e2e.sum()) / simulated
        wait = (flight - simulated) * seconds / e2e.size
        return replace(self, ttft=ttft + wait, e2e=e2e + wait, tpot=tpot, count=e2e.size, seconds=seconds)

    def extrapolate(
        self, input_len: IntArray, output_len: IntArray, simulated: int | None, flight: int, delay: float
    ) -> RequestTimes:
        """Return the times of all requests of these lengths; the first ones were simulated.

        The other requests repeat the simulated ones without both ends. In a closed loop with `flight` requests in
        flight, those beyond `simulated` wait, and the first wave starts `delay` seconds later. In an overloaded open
        loop (`simulated` is None) each request waits longer than the previous one.
        """
        count, sample, ends = input_len.size, self.count, simulated or 0
        low, high = max(sample // 4, ends), sample - max(sample // 4, ends)
        index = np.unique(np.linspace(0, count - 1, min(count, MAX_REQUEST_TIMES)).astype(np.int64))
        source = np.where(index < low, index, low + index % (high - low))
        if simulated is not None:
            gap = float(self.e2e[low:high].mean()) / simulated  # from one end to the next (Little's law)
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
