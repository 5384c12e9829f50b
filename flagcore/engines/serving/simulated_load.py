"""Simulates the requests of a load point on its lanes, and computes the figures of a client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.serving import Load
from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.engines.serving.load.figures import statistics_of, widest_limits
from flagcore.engines.serving.load.traffic import in_flight, traffic
from flagcore.engines.serving.model.price import Price
from flagcore.engines.serving.model.simulation import Outcome, simulate

WAVES = 10
"""A steady state is simulated with this multiple of the requests in flight, as published points are measured."""

STEADY_RATIO = 0.9
"""Its lengths are drawn from this share of a length on: requests of one length would stay in step."""

OPEN = 64
"""The requests in flight that represent an endless open loop."""

MAX_REQUESTS = 6000
"""Most simulated requests of one lane, but three times those in flight; the others are extrapolated."""

SPARE = 64
"""Least number of waiting requests if more are in flight than can run."""


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The requests of a load, drawn once for all candidates."""

    load: Load
    input_len: IntArray
    output_len: IntArray
    arrivals: FloatArray | None

    @classmethod
    def draw(cls, load: Load) -> SimulatedLoad:
        """Draw the requests of `load`. Raises SpecError for one that cannot be sent, or an unreadable trace."""
        sent = load = in_flight(load)
        if load.num_prompts is None and load.trace is None:
            flight = load.concurrency or OPEN
            count = max(min(WAVES * flight, MAX_REQUESTS), 2 * flight, 16)
            ratio = STEADY_RATIO if load.range_ratio == 1.0 and load.range_spread is None else load.range_ratio
            sent = replace(load, num_prompts=count, range_ratio=ratio)
        drawn = traffic(sent)
        return cls(load, drawn.input_len, drawn.output_len, drawn.arrive_s)

    def at(self, value: float) -> SimulatedLoad:
        """Return the load with other clients, or at another rate if it has one."""
        if self.load.request_rate is None or self.arrivals is None:
            return replace(self, load=replace(self.load, concurrency=int(value)))
        arrivals = self.arrivals * (self.load.request_rate / value)
        return replace(self, load=replace(self.load, request_rate=value), arrivals=arrivals)

    @property
    def longest(self) -> float:
        return float((self.input_len + self.output_len).max())

    @property
    def means(self) -> tuple[float, float]:
        return float(self.input_len.mean()), float(self.output_len.mean())

    def flight(self, lanes: int) -> int:
        """Return the most requests in flight on one of several lanes."""
        return -(-self._in_flight // min(lanes, self._in_flight))

    @property
    def _in_flight(self) -> int:
        return min(self.load.concurrency or self.input_len.size, self.input_len.size)

    def figures(self, kinds: Sequence[tuple[Price, int]], slo: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of the load on one or several kinds of lanes and their counts; rates are of all lanes."""
        lanes = sum(count for _, count in kinds)
        flight, here = self._in_flight, self.flight(lanes)
        if len(kinds) > 1:
            served = RequestTimes.from_outcome(self._several_kinds(kinds, here))
            if flight < lanes:  # some are always idle; a request goes to the least used one
                return figures_of(served.steady_state(flight, flight), 1.0, slo)
            served = served.steady_state(here * lanes, here * lanes) if self._is_steady else served
            return figures_of(served, flight / here / lanes, slo)
        served = self._one_lane(kinds[0][0], min(lanes, flight), here)
        if self.arrivals is not None:  # the last request goes to another lane
            served = replace(served, seconds=max(served.seconds, float(self.arrivals[-1] + served.e2e[-1])))
        return figures_of(served, flight / here, slo)  # the number of full lanes

    @property
    def _is_steady(self) -> bool:
        """Whether it is a steady state of a closed loop."""
        return self.load.num_prompts is None and self.load.trace is None and self.arrivals is None

    def _one_lane(self, price: Price, lanes: int, flight: int) -> RequestTimes:
        """Return the requests of one of `lanes` lanes, `flight` of them in flight.

        Requests that arrive when all slots are busy only wait: a closed loop and a burst are simulated with fewer of
        them in flight, and the others wait longer. Beyond `MAX_REQUESTS` the first ones represent all.
        """
        inputs, outputs = self.input_len[::lanes], self.output_len[::lanes]
        arrivals = None if self.arrivals is None else self.arrivals[::lanes]
        if inputs.size <= MAX_REQUESTS:
            some, few, closed = inputs.size, flight, arrivals is None
        else:
            closed = arrivals is None or not arrivals[-1]
            places = min(price.lane.running, price.lane.cache_tokens / max(float(inputs.mean()), 1.0))
            few = int(min(flight, math.ceil(2 * places) + SPARE)) if closed else flight
            some = min(inputs.size, max(MAX_REQUESTS, 3 * few if closed else 0))
        lengths = list(zip(inputs[:some].tolist(), outputs[:some].tolist(), strict=True))
        times = None if (closed and few < flight) or arrivals is None else arrivals[:some].tolist()
        served = RequestTimes.from_outcome(simulate(price, lengths, times, few))
        if self._is_steady:
            return served.steady_state(few, flight, crowded=price.lane.running < flight)
        if some < inputs.size:
            return served.extrapolated(inputs, outputs, few if times is None else None, flight)
        return served

    def _several_kinds(self, kinds: Sequence[tuple[Price, int]], flight: int) -> Outcome:
        """Return the requests of lanes that differ, each with its share of them.

        With least-connections balancing all lanes have about as many requests in flight, so a lane gets requests in
        inverse proportion to their duration there (Little's law); equal shares if all are sent at once, or if lanes
        are idle. Two rounds: equal shares give the durations.
        """
        lanes = sum(count for _, count in kinds)
        shares = [1.0 / lanes] * len(kinds)
        blind = (self.load.concurrency or lanes) < lanes or (self.arrivals is not None and not self.arrivals[-1])
        for _ in range(1 if blind else 2):
            last = [self._lane(price, share, flight) for (price, _), share in zip(kinds, shares, strict=True)]
            speeds = [len(out.requests) / sum(each.end - each.arrival for each in out.requests) for out in last]
            whole = sum(speed * count for speed, (_, count) in zip(speeds, kinds, strict=True))
            shares = [speed / whole for speed in speeds]
        joined = Outcome([], duration=max(out.duration for out in last))
        for out, (_, count) in zip(last, kinds, strict=True):
            joined.requests += out.requests * count
            joined.gaps += out.gaps * count
            joined.preemptions += out.preemptions * count
        return joined

    def _lane(self, price: Price, share: float, flight: int) -> Outcome:
        """Return the outcome of a lane with `share` of the requests, at most `MAX_REQUESTS`."""
        many = max(1, min(round(share * self.input_len.size), MAX_REQUESTS))
        places = np.minimum((np.arange(many) / share).astype(np.int64), self.input_len.size - 1)
        arrivals = None if self.arrivals is None else self.arrivals[places].tolist()
        lengths = list(zip(self.input_len[places].tolist(), self.output_len[places].tolist(), strict=True))
        return simulate(price, lengths, arrivals, flight)


def figures_of(served: RequestTimes, lanes: float, slo: Mapping[str, float]) -> dict[str, float]:
    """Return latencies by statistic and rates, as `flagcore.engines.serving.load.figures` defines them."""
    per = lanes * served.count / max(served.seconds, 1e-9)
    several = ~np.isnan(served.tpot)
    good = float(_good(served, several, slo).mean())
    found = {
        "output_tokens_per_s": served.output_len * per,
        "total_tokens_per_s": (served.input_len + served.output_len) * per,
        "requests_per_s": per,
        "goodput_requests_per_s": good * per,
    }
    for name, values, weights in (
        ("ttft_s", served.ttft, None),
        ("tpot_s", served.tpot[several], None),
        ("itl_s", np.array([gap for gap, _ in served.gaps]), np.array([float(count) for _, count in served.gaps])),
        ("e2e_s", served.e2e, None),
    ):
        found |= {f"{name}.{statistic}": value for statistic, value in _statistics(values, weights).items()}
    return found


def _statistics(values: FloatArray, weights: FloatArray | None) -> dict[str, float]:
    """Return mean and percentiles; 0 without values, as between the tokens of one-token answers."""
    if not values.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    if weights is None:
        return statistics_of(values)
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    places = np.minimum(np.searchsorted(below, np.array([0.5, 0.9, 0.99]) * below[-1]), values.size - 1)
    p50, p90, p99 = (float(each) for each in values[order][places])
    return {"mean": float((values * weights).sum() / weights.sum()), "p50": p50, "p90": p90, "p99": p99}


def _good(served: RequestTimes, several: BoolArray, slo: Mapping[str, float]) -> BoolArray:
    """Return which requests keep all limits on their latencies, the widest of several on one latency."""
    widest = widest_limits(slo)
    good = np.ones(served.ttft.size, dtype=np.bool_)
    tpot = np.where(several, served.tpot, 0.0)
    for name, values in (("ttft_s", served.ttft), ("tpot_s", tpot), ("e2e_s", served.e2e)):
        if name in widest:
            good &= values <= widest[name]
    return good


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
