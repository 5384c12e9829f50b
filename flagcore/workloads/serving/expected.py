"""What a load point is expected to measure on one lane: its requests simulated, and the figures of a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flagcore.domain.serving import Load
from flagcore.domain.space import BoolArray, FloatArray
from flagcore.physics.serving.price import Price
from flagcore.physics.serving.simulation import Outcome, simulate
from flagcore.workloads.serving.load.traffic import traffic

WAVES = 10
"""A steady state is simulated as so many times the requests in flight, as published points are measured."""

STEADY_RATIO = 0.9
"""Its lengths are drawn from this share of a length to the length itself: requests of one length would stay in step."""

OPEN = 64
"""What stands for the requests in flight of an open loop without end."""

MOST_REQUESTS = 6000
"""No more requests of one lane are simulated, but twice those in flight."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Requests of a load, drawn once for all candidates."""

    load: Load
    lengths: list[tuple[int, int]]
    arrivals: list[float] | None

    @classmethod
    def of(cls, load: Load) -> Expected:
        """Draw the requests of `load`. Raises SpecError for one that cannot be sent, or an unreadable trace."""
        sent = load
        if load.num_prompts is None and load.trace is None:
            flight = load.concurrency or OPEN
            count = max(min(WAVES * flight, MOST_REQUESTS), 2 * flight, 16)
            ratio = STEADY_RATIO if load.range_ratio == 1.0 and load.range_spread is None else load.range_ratio
            sent = replace(load, num_prompts=count, range_ratio=ratio)
        drawn = traffic(sent)
        arrivals = None if drawn.arrive_s is None else drawn.arrive_s.tolist()
        return cls(load, list(zip(drawn.input_len.tolist(), drawn.output_len.tolist(), strict=True)), arrivals)

    @property
    def longest(self) -> float:
        """Tokens of the longest request, prompt and answer."""
        return float(max(sum(lengths) for lengths in self.lengths))

    def flight(self, lanes: int) -> int:
        """Return how many requests one of several lanes may have in flight: its share, of an open loop all of them."""
        most = self.load.concurrency or len(self.lengths)
        return -(-most // min(lanes, most))

    def figures(self, kinds: Sequence[tuple[Price, int]], slo: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of the load on lanes of one kind or several, so many of each; rates of all together."""
        lanes = sum(count for _, count in kinds)
        flight, here = self.load.concurrency or len(self.lengths), self.flight(lanes)
        steady = self.load.num_prompts is None and self.load.trace is None and self.arrivals is None
        if len(kinds) > 1:
            outcome = self._together(kinds, here)
            if flight < lanes:  # some are always idle, and a request goes to the one that has had the fewest
                return figures_of(outcome, 1.0, slo, steady=True, flight=flight)
            return figures_of(outcome, flight / here / lanes, slo, steady=steady, flight=here * lanes)
        lanes = min(lanes, flight)
        share = flight / here  # how many full lanes the load makes
        mine = self.lengths[::lanes] if lanes > 1 else self.lengths
        arrivals = self.arrivals[::lanes] if self.arrivals is not None and lanes > 1 else self.arrivals
        outcome = simulate(kinds[0][0], mine, arrivals, here)
        return figures_of(outcome, share, slo, steady=steady, flight=here)

    def _together(self, kinds: Sequence[tuple[Price, int]], flight: int) -> Outcome:
        """Return what happens on lanes that are not alike, each with the requests that come to it.

        Where each request goes to the lane with the fewest in flight, all have about as many, so a lane is sent
        requests in proportion to 1 over the time that one takes there (Little's law); equally many where the load
        cannot know, since all are sent at once, or where lanes are idle. Two rounds: equal shares tell the times.
        """
        lanes = sum(count for _, count in kinds)
        shares = [1.0 / lanes] * len(kinds)
        blind = (self.load.concurrency or lanes) < lanes or (self.arrivals is not None and not any(self.arrivals))
        for _ in range(1 if blind else 2):
            found = [self._lane(price, share, flight) for (price, _), share in zip(kinds, shares, strict=True)]
            speeds = [len(out.requests) / sum(each.end - each.arrival for each in out.requests) for out in found]
            last, shares = (
                found,
                [
                    speed / sum(other * count for other, (_, count) in zip(speeds, kinds, strict=True))
                    for speed in speeds
                ],
            )
        joined = Outcome([], duration=max(out.duration for out in last))
        for out, (_, count) in zip(last, kinds, strict=True):
            joined.requests += out.requests * count
            joined.gaps += out.gaps * count
            joined.preemptions += out.preemptions * count
        return joined

    def _lane(self, price: Price, share: float, flight: int) -> Outcome:
        """Return what happens on a lane that is sent `share` of the requests."""
        many = max(1, round(share * len(self.lengths)))
        places = [min(int(place / share), len(self.lengths) - 1) for place in range(many)]
        arrivals = None if self.arrivals is None else [self.arrivals[place] for place in places]
        return simulate(price, [self.lengths[place] for place in places], arrivals, flight)


def figures_of(
    outcome: Outcome, lanes: float, slo: Mapping[str, float], *, steady: bool, flight: int
) -> dict[str, float]:
    """Return latencies by statistic and rates, as `flagcore.workloads.serving.load.figures` defines them.

    In a steady state rates are those of `flight` requests that take as long as they do in the mean (Little's law).
    """
    requests = outcome.requests
    prompts, outputs, sent, first, end = (
        np.array([getattr(request, name) for request in requests], dtype=np.float64)
        for name in ("prompt", "output", "arrival", "first", "end")
    )
    ttft, e2e = first - sent, end - sent
    several = outputs > 1
    tpot = (end - first)[several] / (outputs[several] - 1.0)
    seconds = float(e2e.sum()) / flight if steady else outcome.duration
    per = lanes / max(seconds, 1e-9)
    gaps = outcome.gaps
    found = {
        "output_tokens_per_s": float(outputs.sum()) * per,
        "total_tokens_per_s": float((prompts + outputs).sum()) * per,
        "requests_per_s": len(requests) * per,
        "goodput_requests_per_s": _good(ttft, tpot, several, e2e, slo) * per,
    }
    for name, values, weights in (
        ("ttft_s", ttft, None),
        ("tpot_s", tpot, None),
        ("itl_s", np.array([gap for gap, _ in gaps]), np.array([float(count) for _, count in gaps])),
        ("e2e_s", e2e, None),
    ):
        found |= {f"{name}.{statistic}": value for statistic, value in _statistics(values, weights).items()}
    return found


def _statistics(values: FloatArray, weights: FloatArray | None) -> dict[str, float]:
    """Return mean and percentiles; where all answers are one token, nothing follows the first: 0."""
    if not values.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"), 0.0)
    if weights is None:
        p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
        return {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    places = np.minimum(np.searchsorted(below, np.array([0.5, 0.9, 0.99]) * below[-1]), values.size - 1)
    p50, p90, p99 = (float(each) for each in values[order][places])
    return {"mean": float((values * weights).sum() / weights.sum()), "p50": p50, "p90": p90, "p99": p99}


def _good(ttft: FloatArray, tpot: FloatArray, several: BoolArray, e2e: FloatArray, slo: Mapping[str, float]) -> int:
    """Return how many requests keep all limits on a latency of theirs, the widest of those on several statistics."""
    widest: dict[str, float] = {}
    for figure, limit in slo.items():
        name = figure.partition(".")[0]
        widest[name] = max(limit, widest.get(name, 0.0))
    each = np.zeros(ttft.size)
    each[several] = tpot
    good = np.ones(ttft.size, dtype=np.bool_)
    for name, values in (("ttft_s", ttft), ("tpot_s", each), ("e2e_s", e2e)):
        if name in widest:
            good &= values <= widest[name]
    return int(good.sum())
