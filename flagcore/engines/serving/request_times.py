"""The latencies of a lane's requests, simulated or extrapolated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.serving.model.simulation import Outcome

MAX_REQUEST_TIMES = 20_000
"""Most requests with their own latencies; of more, an even sample."""

GROWS = 0.02
"""An open loop is overloaded if its waits grow by more than this share of the time between two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Latencies of some requests in seconds, and totals of all.

    `tpot` is NaN for answers of one token; `gaps` as in `Outcome`. `input_len` and `output_len` are mean tokens of the
    `count` requests, `seconds` the time from the first to the last.
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

    def steady_state(self, simulated: int, flight: int, *, crowded: bool = False) -> RequestTimes:
        """Return a steady state of `flight` requests in flight, of which `simulated` were simulated.

        Rates follow from `flight` and the mean duration (Little's law); those beyond `simulated` wait. If it is
        `crowded`, requests wait for slots: the first wave, which found free slots, and the last are left out.
        """
        some = slice(simulated, self.count - simulated) if crowded and self.count > 2 * simulated else slice(None)
        ttft, e2e, tpot = self.ttft[some], self.e2e[some], self.tpot[some]
        seconds = float(e2e.sum()) / simulated
        wait = (flight - simulated) * seconds / e2e.size
        return replace(self, ttft=ttft + wait, e2e=e2e + wait, tpot=tpot, count=e2e.size, seconds=seconds)

    def extrapolated(
        self, input_len: IntArray, output_len: IntArray, simulated: int | None, flight: int
    ) -> RequestTimes:
        """Return all requests of these lengths, of which the first were simulated.

        The others are like those in the middle. In a closed loop of `flight`, of which `simulated` were in flight,
        those beyond wait; in an overloaded open loop (None) each waits longer than the one before.
        """
        count, some, ends = input_len.size, self.count, simulated or 0
        low, high = max(some // 4, ends), some - max(some // 4, ends)
        place = np.unique(np.linspace(0, count - 1, min(count, MAX_REQUEST_TIMES)).astype(np.int64))
        like = np.where(place < low, place, low + place % (high - low))
        if simulated is not None:
            gap = float(self.e2e[low:high].mean()) / simulated  # from one end to the next (Little's law)
            wait = np.clip(np.minimum(place, flight) - simulated, 0, None) * gap
            seconds = self.seconds + (count - some) * gap
        else:
            quarters = self.ttft[: 4 * (some // 4)].reshape(4, -1).mean(axis=1)
            between = float(self.sent[-1]) / max(some - 1, 1)
            gap = float(quarters[3] - quarters[1]) / (some // 2)
            gap = gap if gap > GROWS * between else 0.0
            wait = (place - like) * gap
            seconds = self.seconds + (count - some) * (between + gap)
        return replace(
            self,
            ttft=self.ttft[like] + wait,
            e2e=self.e2e[like] + wait,
            tpot=self.tpot[like],
            input_len=float(input_len.mean()),
            output_len=float(output_len.mean()),
            count=count,
            seconds=seconds,
        )
