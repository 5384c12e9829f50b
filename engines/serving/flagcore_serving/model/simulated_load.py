"""Simulates the requests of a load point on its lanes (instances), and computes the metrics that a client would
measure.

A prefix cache contains the tokens of earlier turns, and of blocks or texts that requests share (see `tiers`). Generated
answers are never reused: the next turn contains the answer of the trace instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import accumulate, pairwise, takewhile
from operator import add
from typing import Any

import numpy as np

from flagcore.domain.model import Vision
from flagcore.domain.space import FloatArray, IntArray
from flagcore_serving.job import OPEN_LOOP_FLIGHT, Load
from flagcore_serving.load.figures import MAX_TURNS, TASK_S, TURN_TTFT
from flagcore_serving.load.images import image_tokens
from flagcore_serving.load.traces import Traffic
from flagcore_serving.load.traffic import in_flight, traffic
from flagcore_serving.model.disaggregated import Disaggregated, Prefill
from flagcore_serving.model.price import UNLIMITED_TOKENS, Lane, Price
from flagcore_serving.model.prompts import prefix_lanes, prompt_parts, turn_order
from flagcore_serving.model.request_times import RequestTimes, SimulationCheck, figures_of
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.tiers import Part, cached_tokens
from flagcore_serving.model.vision import ImageWork, image_work
from flagcore_serving.space.settings import TIERS

HIT_RATE = "cache_hit_rate"
"""The share of prompt tokens that were in the prefix cache."""
TIER_HIT_RATE = "{tier}_hit_rate"
"""The share of prompt tokens that were in one tier of this cache: `device`, or one of TIERS."""
CACHE_FIGURES = (
    HIT_RATE,
    *(TIER_HIT_RATE.format(tier=tier) for tier in ("device", *TIERS)),
    "cache_load_s",
    "cache_compute_s",
)
"""Figures of loads whose prompts share parts. The last two are the mean seconds of a request to load what is not on the
devices, and the seconds that computing it alone would take."""

WAVES_IN_FLIGHT = 10
"""Number of requests that are simulated for a steady state, per request in flight, as in published measurements."""

STEADY_RATIO = 0.9
"""Minimum length of a simulated request in a steady state, relative to the load's length, if iterations combine prompts
and decoding. Requests of equal length are then measured to spread over time (benchmarks/LOG.md)."""

MAX_REQUESTS = 6000
"""Maximum number of simulated requests of one lane; the times of the others are extrapolated. In a closed loop, at
least three times as many as are in flight are simulated."""

MAX_SEARCHED = 1000
"""Maximum number of simulated requests of a trace in a search for the highest rate, to limit the time of a search."""

SEARCHED, MOST_SEARCHED = 2000, 4000
"""Least and most simulated requests of another load in such a search, if their number grows with the rate.

In a shorter load, the queue of a server near its limit does not build up (benchmarks/LOG.md). Servers share the
requests, so a rate that is found is searched again if they are fewer than WAVES_IN_FLIGHT times those in flight, with
up to MOST_SUSTAINED."""

MOST_SUSTAINED = 32000
"""Most simulated requests of a load whose rate must be sustained. A choice."""

MIN_WAITING = 64
"""Minimum number of simulated requests that wait, if more are in flight than can run."""


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """The requests of a load, drawn once for all candidates.

    - `input_len`: prompt tokens, including the tokens of images.
    - `equal`: the tokens of each prompt and answer of a steady state if all are equal, although these were varied.
    - `is_text`: whether prompts are texts, which servers must tokenize.
    - `images`: the other work for the images of each request.
    - `parts`: the parts of each prompt that a prefix cache may contain.
    - `turn`: the turn of each request in its conversation; None if there are no conversations.
    - `wait_s`: seconds before each turn; 0 for first ones.
    - `is_spread`: whether later turns have arrival times of their own.
    - `prefix_aware`: as in ServeSpec.
    - `vision`: the vision tower of the model; None if it has none.
    - `adapters`: the adapter of each request, -1 for none; None if none uses one.
    - `hits`: results of `_hits_of` before rounding, by number of lanes, page and sizes of the tiers.
    - `rows`: results of `_rows`, by number of lanes.
    """

    load: Load
    input_len: IntArray
    output_len: IntArray
    arrivals: FloatArray | None
    equal: tuple[int, int] | None = None
    is_text: bool = False
    images: Sequence[ImageWork] = ()
    parts: Sequence[Sequence[Part]] = ()
    turn: IntArray | None = None
    wait_s: FloatArray | None = None
    is_spread: bool = False
    prefix_aware: bool = False
    vision: Vision | None = None
    adapters: IntArray | None = None
    hits: dict[tuple[float, ...], FloatArray] = field(default_factory=dict, compare=False)
    rows: dict[int, IntArray] = field(default_factory=dict, compare=False)

    @classmethod
    def draw(cls, load: Load, vision: Vision | None = None, *, prefix_aware: bool = False) -> SimulatedLoad:
        """Draw the requests of `load`. Images count only if the model has a `vision` tower.

        Raises SpecError for an invalid load or an unreadable trace.
        """
        load = in_flight(load)
        if load.least_s and load.trace is None:
            load = replace(load, num_prompts=max(load.num_prompts or 0, SEARCHED))
        is_endless = load.num_prompts is None and load.trace is None
        drawn_load, equal = _endless(load) if is_endless else (load, None)
        requests = traffic(drawn_load)
        images = requests.images if vision is not None else ()
        drawn = cls(
            load,
            requests.input_len + image_tokens(images, vision) if images and vision else requests.input_len,
            requests.output_len,
            requests.arrive_s,
            equal,
            bool(requests.texts or images),
            image_work(images, vision) if vision else (),
            prompt_parts(requests, load.prefix_len),
            prefix_aware=prefix_aware,
            vision=vision,
            adapters=requests.adapters,
        )
        return drawn if requests.follows is None else drawn._with_turns(requests)

    def _with_turns(self, requests: Traffic) -> SimulatedLoad:
        """Return the load of conversations with its requests in the order in which they are sent."""
        task, turn = requests.tasks
        flight = min(self.load.concurrency or self.input_len.size, int((turn == 0).sum()))
        load = self.load if requests.arrive_s is not None else replace(self.load, concurrency=flight)
        drawn = replace(self, load=load, turn=turn, wait_s=requests.wait_s)
        return drawn._ordered(turn_order(task, turn, flight), self.arrivals)

    def _spread(self, answer_s: float) -> SimulatedLoad:
        """Return an open loop of conversations in which each turn arrives after the one before, the seconds `answer_s`
        of its answer, and its wait."""
        assert self.turn is not None
        assert self.arrivals is not None
        arrivals = self.arrivals + self.turn * (answer_s + self.think_s)
        return replace(self._ordered(np.argsort(arrivals, kind="stable"), arrivals), is_spread=True, hits={})

    @property
    def think_s(self) -> float:
        """The mean seconds before a later turn."""
        waits = np.zeros(0) if self.turn is None or self.wait_s is None else self.wait_s[self.turn > 0]
        return float(waits.mean()) if waits.size else 0.0

    def _task_figures(self, times: RequestTimes, rows: IntArray, e2e_s: float) -> dict[str, float]:
        """Return the mean TTFT of each turn, and the mean time of a conversation. `rows`: the simulated requests.

        `e2e_s`: the mean time of a request."""
        assert self.turn is not None
        figures, turns = dict[str, float](), self.turn[rows]
        if times.ttft.size == turns.size:
            for turn in np.unique(turns)[:MAX_TURNS].tolist():
                figures[TURN_TTFT.format(number=turn + 1)] = float(times.ttft[turns == turn].mean())
        count = np.count_nonzero(self.turn == 0)
        return figures | {TASK_S: (self.turn.size * e2e_s + (self.turn.size - count) * self.think_s) / count}

    def _ordered(self, order: IntArray, arrivals: FloatArray | None) -> SimulatedLoad:
        names = ("input_len", "output_len", "turn", "wait_s", "adapters")
        columns: dict[str, Any] = {"arrivals": arrivals, **{name: getattr(self, name) for name in names}}
        columns = {name: None if column is None else column[order] for name, column in columns.items()}
        images = [self.images[index] for index in order] if self.images else ()
        return replace(self, **columns, images=images, parts=[self.parts[index] for index in order])

    def _hits_of(self, price: Price, lanes: int) -> FloatArray:
        """Return how many prompt tokens of each request on a lane (one of `lanes`) each tier of its prefix cache has.

        The shape is (tiers, requests). The first tier is the cache of the devices, without the prefix that all requests
        share. Unless a warm-up has sent it, the first request of each rank misses this prefix: it has fewer tokens."""
        rows, lane = self._rows(lanes), price.lane
        within = [np.zeros(rows.size)]
        reaches = (lane.retained, *(tier.reach for tier in lane.tiers)) if self.parts else ()
        for number, reach in enumerate(reaches):
            ahead = within[-1] if price.overheads.own_order and number else None
            key = (lanes, lane.page, *(reaches[: number + 1] if ahead is not None else (reach,)))
            if key not in self.hits:
                parts, answers = [self.parts[row] for row in rows], self.output_len[rows].tolist()
                answers, page = answers if ahead is None else [], int(lane.page)
                self.hits[key] = cached_tokens(parts, reach, answers, whole=lane.whole_prompts, page=page, ahead=ahead)
            within.append(self.hits[key] // lane.page * lane.page)
        found = np.diff(np.array(within), axis=0) if len(within) > 1 else np.array(within)
        if not self.load.warmup:
            found[0, : int(lane.ranks)] -= lane.shared_prefix
        return found

    def _rows(self, lanes: int) -> IntArray:
        """Return the indices of the requests on one of `lanes` equal lanes. A prefix-aware router divides requests
        unevenly, so the lane with the median number of requests is used."""
        if lanes not in self.rows:
            lane = np.arange(self.input_len.size) % lanes
            if self.turn is not None:  # any instance may be the least busy one
                lane = np.random.default_rng([self.load.seed, 3]).permutation(lane)
            self.rows[lanes] = np.flatnonzero(lane == 0)
            if self.prefix_aware and self.parts and lanes > 1:
                lane_of = prefix_lanes(self.parts, lanes)
                counts = np.bincount(lane_of, minlength=lanes)
                self.rows[lanes] = np.flatnonzero(lane_of == np.argsort(counts, kind="stable")[lanes // 2])
            elif self._varies and lanes > 1:
                self.rows[lanes] = _share(np.stack([self.output_len, self.input_len]), lanes)
        return self.rows[lanes]

    @property
    def _varies(self) -> bool:
        """Whether the lengths were drawn one by one, so that those of a few requests are not those of all."""
        is_divided = self.turn is None and self.load.trace is None and not (self.prefix_aware and self.parts)
        return is_divided and not self.equal and bool(np.ptp(self.output_len) or np.ptp(self.input_len))

    def _shared_parts(self, lane: Lane, rows: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return the numbers and the tokens of the parts of each prompt that other requests have, too, in whole blocks,
        if the cache may be full."""
        if not (self.parts and lane.retained) or lane.whole_prompts or lane.cache_tokens >= UNLIMITED_TOKENS:
            return []
        counts, page = Counter(name for row in rows for name, _ in self.parts[row]), int(lane.page)
        numbers = {name: number for number, name in enumerate(counts)}
        found = list[list[tuple[int, int]]]()
        for row in rows:
            shared = list(takewhile(lambda part: counts[part[0]] > 1, self.parts[row]))
            ends = [end // page * page for end in accumulate((size for _, size in shared), initial=0)]
            sizes = zip(shared, pairwise(ends), strict=True)
            found.append([(numbers[name], end - start) for (name, _), (start, end) in sizes])
        return found

    def _adapters(self, price: Price, rows: IntArray) -> list[int]:
        """Return the adapters of requests that need a slot, the base model as the last one if it needs one, too."""
        if self.adapters is None or not price.lane.adapters:
            return []
        used = self.adapters[rows]
        return list(np.where(used < 0, self.load.adapters, used) if price.overheads.base_takes_slot else used)

    @staticmethod
    def _loads(price: Price, hits: FloatArray) -> FloatArray:
        """Return the seconds in which each request loads its `hits` from the tiers behind the devices."""
        seconds: FloatArray = np.array([0.0, *(tier.token_s for tier in price.lane.tiers)]) @ hits
        return seconds

    def _cache_figures(self, price: Price, lanes: int) -> dict[str, float]:
        """Return the shares of prompt tokens that the prefix caches of `lanes` equal lanes contain, and those of each
        tier. With tiers behind the devices, also the mean seconds of a request to load from them, and what computing
        the same tokens alone would take."""
        inputs, hits = self.input_len[self._rows(lanes)], self._hits_of(price, lanes)
        hits[0] += price.lane.shared_prefix
        found = np.diff(np.minimum(np.cumsum(hits, axis=0), inputs - 1.0), axis=0, prepend=0.0).sum(axis=1)
        names, rates = ("device", *(tier.name for tier in price.lane.tiers)), (found / inputs.sum()).tolist()
        figures = {HIT_RATE: sum(rates)}
        if price.lane.tiers:
            figures |= {TIER_HIT_RATE.format(tier=name): rate for name, rate in zip(names, rates, strict=True)}
            loaded = hits[1:].sum(axis=0)
            share, tokens = float((loaded > 0.0).mean()), float(loaded[loaded > 0.0].mean()) if loaded.any() else 0.0
            pairs = tokens * (float(hits[0].mean()) + 0.5 * tokens)
            figures["cache_load_s"] = float(self._loads(price, hits).mean())
            figures["cache_compute_s"] = share * price.mixed(0, tokens, tokens, pairs, 0) if tokens else 0.0
        return figures

    def at(self, value: float, least: float = 0.0) -> SimulatedLoad:
        """Return the load at another request rate or, if it has none, with another number of clients. `least`: the
        least number of requests, if their number grows with the rate."""
        if self.load.request_rate is None or self.arrivals is None:
            load = replace(self.load, concurrency=int(value))
            is_endless = load.num_prompts is None and load.trace is None
            return _drawn(load, self.vision, prefix_aware=self.prefix_aware) if is_endless else replace(self, load=load)
        load = self.load.at("request_rate", value)
        if load.least_s and load.trace is None:
            return self._searched(load, value, least)
        if load.num_prompts != self.load.num_prompts:
            load = replace(load, least_s=0.0, num_prompts=min(load.num_prompts or 0, MAX_SEARCHED))
            return _drawn(load, self.vision, prefix_aware=self.prefix_aware)
        return replace(self, load=load, arrivals=self.arrivals * (self.load.request_rate / value))

    def alone(self, lanes: int) -> SimulatedLoad:
        """Return an open loop of 64 requests for each lane, so rare that each of them finds an idle lane."""
        load = replace(self.load, num_prompts=64 * lanes, request_rate=1e-4, least_s=0.0, warmup=1)
        return _drawn(load, self.vision, prefix_aware=self.prefix_aware)

    def _searched(self, load: Load, value: float, least: float) -> SimulatedLoad:
        """Return the load at a rate that a search tries. Its number of requests is a power of two times SEARCHED, so
        that rates and candidates share their requests."""
        most = MOST_SUSTAINED if least else MOST_SEARCHED
        steps = math.ceil(math.log2(max(load.num_prompts or 0, least, SEARCHED) / SEARCHED))
        count = min(SEARCHED << steps, most)
        drawn = _drawn(replace(self.load, num_prompts=count), self.vision, prefix_aware=self.prefix_aware)
        assert drawn.arrivals is not None
        scale = (drawn.load.request_rate or value) / value
        return replace(drawn, load=replace(drawn.load, request_rate=value), arrivals=drawn.arrivals * scale)

    @property
    def longest(self) -> float:
        return float((self.input_len + self.output_len).max())

    @property
    def means(self) -> tuple[float, float]:
        return float(self.input_len.mean()), float(self.output_len.mean())

    @property
    def image_tokens(self) -> float:
        """The mean number of tokens of the images of a request."""
        return float(np.mean([each.tokens for each in self.images])) if self.images else 0.0

    def flight(self, lanes: int) -> int:
        """Return the maximum number of requests in flight on one lane if there are `lanes` lanes."""
        return -(-self._in_flight // min(lanes, self._in_flight))

    @property
    def _in_flight(self) -> int:
        return min(self.load.concurrency or self.input_len.size, self.input_len.size)

    def figures(
        self, price: Price, lanes: int, slo: Mapping[str, float], prefill: Prefill | None = None, *, stops: bool = False
    ) -> dict[str, float]:
        """Return the metrics of the load on `lanes` equal lanes. Rates are totals over all lanes.

        If there is a `prefill`, the lanes only decode. In an open loop, later turns arrive after the mean time of an
        answer, which a first simulation determines. With `stops`, the simulation of an open loop ends once it is
        certain to exceed a limit of `slo`, and the result is empty.
        """
        if self.turn is not None and self.arrivals is not None and not self.is_spread:
            figures = self._spread(0.0).figures(price, lanes, slo, prefill)
            return self._spread(figures["e2e_s.mean"]).figures(price, lanes, slo, prefill, stops=stops)
        flight, lane_flight = self._in_flight, self.flight(lanes)
        times = self._one_lane(price, min(lanes, flight), lane_flight, prefill, slo if stops else {})
        if times is None:
            return {}
        if self.arrivals is not None:  # the last request of the load may run on another lane
            times = replace(times, seconds=max(times.seconds, float(self.arrivals[-1] + times.e2e[-1])))
        figures = figures_of(times, flight / lane_flight, slo)  # the second argument: full lanes
        if self.turn is not None:
            figures |= self._task_figures(times, self._rows(min(lanes, flight)), figures["e2e_s.mean"])
        return figures | self._cache_figures(price, min(lanes, flight)) if self.parts else figures

    def _one_lane(
        self, price: Price, lanes: int, flight: int, prefill: Prefill | None, limits: Mapping[str, float]
    ) -> RequestTimes | None:
        """Return the times of requests on one of `lanes` lanes with `flight` requests in flight.

        If no times are extrapolated, None is returned once it is certain that `limits`, as those of an SLO, are broken.

        Requests that arrive while all slots are busy only wait. A closed loop and a burst are therefore simulated with
        fewer requests in flight, and a wait is added for the others. Of more than `MAX_REQUESTS` requests, the first
        ones represent all.
        """
        rows = self._rows(lanes)
        inputs, outputs = self.input_len[rows], self.output_len[rows]
        places = np.arange(0, self.input_len.size, lanes) if self._varies else rows
        arrivals = None if self.arrivals is None else self.arrivals[places]
        if self.equal and prefill is None and not price.overheads.mixes:
            # Prompts come first, so requests that end together are computed before any of them decodes, and end
            # together again. Others join them: while a prompt delays decoding, the prompts of those that ended arrive.
            # If a knob mixes the chunks of prompts with decoding, those of one iteration stay together.
            inputs, outputs = (np.full_like(inputs, length) for length in self.equal)
        if price.lane.gain > 1.0 and arrivals is None and not np.ptp(outputs):
            outputs = _accepted(outputs, price.lane, self.load.seed)
        count, simulated, is_closed = inputs.size, flight, arrivals is None or not arrivals[-1]
        if count > MAX_REQUESTS:
            size = max(float(inputs.mean()) + price.lane.fixed, 1.0)
            slots = min(price.lane.running, price.lane.cache_tokens / size)
            simulated = int(min(flight, math.ceil(2 * slots) + MIN_WAITING)) if is_closed else flight
            count = min(count, max(MAX_REQUESTS, 3 * simulated if is_closed else 0))
        lengths = list(zip(inputs[:count].tolist(), outputs[:count].tolist(), strict=True))
        images = [self.images[row] for row in rows] if self.images else ()
        arrival_times = None if simulated < flight or arrivals is None else arrivals[:count].tolist()
        if prefill is None:
            hits = self._hits_of(price, lanes)[:, :count]
            later = 0.0 if self.turn is None else float((self.turn > 0).mean())
            think_s = self.think_s * later  # first turns have no think time
            known = hits.sum(axis=0), self._loads(price, hits)
            found, loads = (each.tolist() if each.any() else () for each in known)
            adapters = self._adapters(price, rows[:count])
            parts = self._shared_parts(price.lane, rows[:count].tolist())
            simulation = (price.simulation or Simulation)(
                price, lengths, arrival_times, simulated, found, think_s, images, loads, adapters, parts
            )
        else:
            simulation = Disaggregated(price, prefill, lengths, arrival_times, simulated, images)
        is_whole = arrival_times is not None and count == inputs.size
        outcome = simulation.run(
            SimulationCheck(limits, simulation.requests).has_failed if limits and is_whole else None
        )
        if outcome.is_stopped:
            return None
        times = RequestTimes.from_outcome(outcome)
        if self.load.num_prompts is None and self.load.trace is None and self.arrivals is None:
            # The first wave found free slots, so it counts only if measurements include it, too. If requests wait for
            # slots, neither the first wave nor the last one counts.
            is_crowded = price.lane.running < flight
            return times.endless(
                simulated, flight, simulated * (self.load.is_steady or is_crowded), simulated * is_crowded
            )
        if count < inputs.size:
            accepted_s = price.overheads.entry + price.overheads.prompt_token * float(inputs.mean())
            delay = (flight - simulated) * accepted_s  # the front end accepts the whole first wave before it starts
            return times.extrapolate(inputs, outputs, simulated if arrival_times is None else None, flight, delay)
        return times


def _accepted(outputs: IntArray, lane: Lane, seed: int) -> IntArray:
    """Return answers whose numbers of iterations vary as those of equal answers with drafts, so that they do not end
    together. An iteration yields 1 to 1 + `Lane.drafted` tokens, with the largest variance for their mean."""
    variance = max((lane.gain - 1.0) * (lane.drafted + 1.0 - lane.gain), 0.0)
    share = math.sqrt(variance / (lane.gain * max(float(outputs[0]), 1.0)))
    drawn = np.random.default_rng(seed).standard_normal(outputs.size)
    return np.maximum(np.rint(outputs * (1.0 + share * np.clip(drawn, -3.0, 3.0))), 1.0).astype(outputs.dtype)


def _share(lengths: IntArray, lanes: int) -> IntArray:
    """Return the indices of one in `lanes` requests, whose lengths are distributed as those of all.

    Of as many requests as lanes with similar answers, it takes the one that keeps both means closest to those of all.
    `lengths`: a row of answers and a row of prompts.
    """
    relative = lengths / np.maximum(lengths.mean(axis=1, keepdims=True), 1e-12)
    order, chosen = np.argsort(lengths[0], kind="stable")[::-1].tolist(), list[int]()
    (answers, prompts), answer, prompt = relative.tolist(), 0.0, 0.0
    for start in range(0, len(order), lanes):
        group = order[start : start + lanes]
        answer += reduce(add, (answers[row] for row in group)) / len(group)
        prompt += reduce(add, (prompts[row] for row in group)) / len(group)
        chosen.append(min(group, key=lambda row: abs(answer - answers[row]) + abs(prompt - prompts[row])))
        answer, prompt = answer - answers[chosen[-1]], prompt - prompts[chosen[-1]]
    return np.sort(chosen)


def _endless(load: Load) -> tuple[Load, tuple[int, int] | None]:
    """Return a load with the requests that stand for a steady state, and `SimulatedLoad.equal`."""
    flight = load.concurrency or OPEN_LOOP_FLIGHT
    count = max(min(WAVES_IN_FLIGHT * flight, MAX_REQUESTS), 2 * flight, 16)
    is_equal = load.range_ratio == 1.0 and load.range_spread is None and load.distribution == "uniform"
    drawn = replace(load, num_prompts=count, range_ratio=STEADY_RATIO if is_equal else load.range_ratio)
    is_plain = is_equal and load.request_rate is None and load.turns == 1 and load.images is None
    return drawn, (load.prefix_len + load.input_len, load.output_len) if is_plain else None


_drawn = lru_cache(maxsize=256)(SimulatedLoad.draw)
"""The searches of several candidates share their loads."""
