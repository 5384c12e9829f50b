"""Unequal instances, each simulated with a share of the load, against all of them at once, iteration by iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving import simulate
from flagcore.engines.serving.model.price import Price
from flagcore.engines.serving.simulated_load import SimulatedLoad
from tests.engines.serving.test_predict import LOAD, predict_kinds, task


@dataclass
class Instance:
    """One server: requests that wait, prompts as [request, tokens left], sequences as [request, context, made]."""

    price: Price
    now: float = 0.0
    front_end: float = 0.0
    sent: int = 0
    waiting: list[tuple[float, int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return len(self.waiting) + len(self.prompts) + len(self.running)

    @property
    def next(self) -> float:
        """When its next iteration begins."""
        if self.prompts or self.running:
            return self.now
        return max(self.now, self.waiting[0][0]) if self.waiting else np.inf

    def take(self, request: int, when: float) -> None:
        overheads = self.price.overheads
        self.front_end = max(self.front_end, when) + overheads.entry
        self.waiting.append((self.front_end + overheads.request, request))
        self.sent += 1

    def iterate(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        """Compute an iteration and return the requests that end."""
        lane, start = self.price.lane, self.next
        while self.waiting and self.waiting[0][0] <= start and len(self.prompts) + len(self.running) < lane.running:
            request = self.waiting.pop(0)[1]
            self.prompts.append([request, lengths[request][0]])
        left, tokens, longest, pairs, through = lane.budget - len(self.running), 0.0, 0.0, 0.0, []
        for piece in self.prompts:
            some, before = min(left, piece[1]), lengths[piece[0]][0] - piece[1]
            pairs, tokens, left = pairs + some * (before + 0.5 * some), tokens + some, left - some
            piece[1], longest = int(piece[1] - some), max(longest, some)
            through += [piece[0]] if not piece[1] else []
        self.prompts = [piece for piece in self.prompts if piece[1]]
        sequences, context = len(self.running), sum(each[1] for each in self.running)
        duration = self.price.mixed(sequences, tokens, longest, pairs, len(through)) if tokens else 0.0
        duration = duration or self.price.decode(sequences)
        self.now = start + duration + (self.price.cached(sequences) * context if sequences else 0.0)
        self.running = [[request, held + 1, generated + 1] for request, held, generated in self.running]
        self.running += [[request, lengths[request][0] + 1, 1] for request in through]
        completed = [request for request, _, generated in self.running if generated >= lengths[request][1]]
        self.running = [each for each in self.running if each[0] not in completed]
        return completed


def at_once(load: SimulatedLoad, prices: Sequence[Price]) -> tuple[float, float]:
    """Output tokens per second and mean seconds of a request; requests go where the fewest are in flight."""
    lengths = list(zip(load.input_len.tolist(), load.output_len.tolist(), strict=True))
    servers = [Instance(price) for price in prices]
    arrivals = (
        load.arrivals.tolist() if load.arrivals is not None else [0.0] * min(load.load.concurrency or 1, len(lengths))
    )
    start, ended, first = {}, {}, 0
    while len(ended) < len(lengths):
        server = min(servers, key=lambda each: each.next)
        if first < len(arrivals) and arrivals[first] <= server.next:
            start[first] = arrivals[first]
            min(servers, key=lambda each: (each.in_flight, each.sent)).take(first, arrivals[first])
            first += 1
            continue
        for request in server.iterate(lengths):
            ended[request] = server.now
            if load.arrivals is None and len(arrivals) < len(lengths):
                arrivals.append(server.now)
    answers = sum(output for _, output in lengths)
    return answers / max(ended.values()), float(np.mean([ended[each] - start[each] for each in ended]))


@pytest.mark.parametrize(
    ("load", "near"),
    [
        (replace(LOAD, concurrency=90, num_prompts=450), 0.05),
        (replace(LOAD, concurrency=None, request_rate=40.0, num_prompts=300), 0.02),
        (replace(LOAD, concurrency=None, request_rate=float("inf"), num_prompts=150), 0.05),
    ],
)
@pytest.mark.parametrize("kinds", [((1, 4), (2, 2)), ((1, 4), (4, 1))])
def test_shares_of_a_load_add_up_to_the_result_of_all_instances(
    load: Load, near: float, kinds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[SimulatedLoad, list[tuple[Price, int]]]] = []

    class RecordingLoad(SimulatedLoad):
        def figures(self, kinds: Any, slo: Any) -> dict[str, float]:
            cases.append((self, list(kinds)))
            return super().figures(kinds, slo)

    monkeypatch.setattr(simulate, "SimulatedLoad", RecordingLoad)
    found = predict_kinds(task(load), *kinds)
    expected, parts = cases[0]
    rate, seconds = at_once(expected, [price for price, count in parts for _ in range(count)])
    assert found.figures["output_tokens_per_s"][0] == pytest.approx(rate, rel=near)
    assert found.figures["e2e_s.mean"][0] == pytest.approx(seconds, rel=near)
