"""An instance that only decodes behind instances that prefill: stages, rates, and the transfer of caches."""

from dataclasses import replace

import pytest

from flagcore.engines.serving.model.disaggregated import Disaggregated, Prefill
from flagcore.engines.serving.model.simulation import Lane, Outcome, Price, Simulation
from tests.engines.serving.model.test_simulation import LANE, OVER
from tests.served import times

LENGTHS = [(512, 64)] * 96


def price(lane: Lane = LANE) -> Price:
    return Price(times(), 0, lane, OVER)


def run(
    lengths: list[tuple[int, int]],
    arrivals: list[float] | None,
    concurrency: int = 1,
    *,
    per_decode: float = 1.0,
    transfer: float = 0.0,
    lane: Lane = LANE,
) -> Outcome:
    prefill = Prefill(price=price(), per_decode=per_decode, transfer=transfer)
    return Disaggregated(price(lane), prefill, lengths, arrivals, concurrency).run()


def rate(outcome: Outcome) -> float:
    return len(outcome.requests) / outcome.duration


def prompt_seconds(tokens: float) -> float:
    return price().mixed(0, tokens, tokens, 0.5 * tokens**2, 1)


def test_a_lone_request_passes_through_all_stages_once() -> None:
    (request,) = run([(512, 3)], [1.0], transfer=1e-3).requests
    front = 2.0 * OVER.request + OVER.entry
    first = 1.0 + front + prompt_seconds(512.0) + 512 * 1e-3 + price().decode(1) + price().cached(1) * 512
    assert request.first == pytest.approx(first, rel=1e-3)
    assert request.end > request.first
    assert request.made == 3


def test_prompts_do_not_delay_answers() -> None:
    """A prompt of 16,384 tokens arrives while another answer is decoded."""
    lengths, arrivals = [(64, 400), (16_384, 2)], [0.0, 0.02]
    both = Simulation(price(), lengths, arrivals, 2).run()
    apart = run(lengths, arrivals)
    alone = run(lengths[:1], arrivals[:1])
    assert max(gap for gap, _ in apart.gaps) < 2.0 * max(gap for gap, _ in alone.gaps)
    assert max(gap for gap, _ in both.gaps) > 3.0 * max(gap for gap, _ in apart.gaps)


def test_the_slower_side_limits_the_rate() -> None:
    tokens = LANE.budget // 512 * 512
    limit = (tokens / 512) / price().mixed(0, tokens, 512.0, tokens / 512 * 0.5 * 512**2, int(tokens / 512))
    short = [(512, 2)] * 256
    assert rate(run(short, [0.0] * 256)) == pytest.approx(limit, rel=0.1)
    assert rate(run(short, [0.0] * 256, per_decode=0.25)) == pytest.approx(limit / 4.0, rel=0.1)
    many, few = (rate(run(LENGTHS, None, 32, per_decode=count)) for count in (8.0, 4.0))
    assert many == pytest.approx(few, rel=0.05), "the instance that decodes is the limit"


def test_a_slow_link_delays_and_limits() -> None:
    fast, slow = (run(LENGTHS, None, 16, transfer=seconds) for seconds in (0.0, 1e-3))
    assert min(each.first - each.arrival for each in slow.requests) > 0.512
    assert rate(slow) == pytest.approx(1.0 / 0.512, rel=0.1)
    assert rate(fast) > 2.0 * rate(slow)


def test_all_requests_end_in_order_of_time_with_a_small_cache() -> None:
    outcome = run([(500, 40), (90, 70), (300, 1)] * 20, None, 12, lane=replace(LANE, cache_tokens=2_000.0, running=6.0))
    assert all(each.arrival < each.first <= each.end + 1e-9 for each in outcome.requests)
    assert all(each.made >= each.output for each in outcome.requests)
    assert outcome.preemptions > 0
