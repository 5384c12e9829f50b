"""The scheduler against one that goes token by token, prefill and decode instances, and the closed form of a loop."""

import random
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.model import batches, simulation
from flagcore_serving.model.closed_loop import ClosedLoop, steady_state
from flagcore_serving.model.disaggregated import Disaggregated, Prefill
from flagcore_serving.model.iteration import IterationCosts
from flagcore_serving.model.price import Lane, Price
from flagcore_serving.model.request_times import SimulationCheck
from flagcore_serving.model.sequences import SimulatedRun
from flagcore_serving.model.simulated_load import SimulatedLoad
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.work import UNFITTED

from tests.product import serving_inputs
from tests.product.serving_inputs import times

LANE = Lane(budget=2048.0, running=64.0, cache_tokens=1e9, block=16.0)
OVER = replace(UNFITTED, request=5e-3, entry=1e-3)


def price_of(lane: Lane = LANE, **over: Any) -> Price:
    return Price(times(), 0, lane, replace(OVER, **over))


def test_a_host_that_handles_tokens_slower_than_the_device_determines_an_iteration() -> None:
    plain, slow = price_of(), price_of(replace(LANE, event=1.0, context=100.0))
    assert slow.decode(8) + 8 * 100 * slow.cached(8) == pytest.approx(8.0)
    assert price_of(replace(LANE, event=1e-9)).decode(8) == plain.decode(8)


def token_by_token(
    price: Price, lengths: list[tuple[int, int]], arrivals: list[float] | None, concurrency: int
) -> list[tuple[float, float]]:
    """First and last token of each request, of an engine without preemption that looks at each iteration.

    With `lane.ahead`, an iteration is planned when the one before starts: with what was ready and had ended by then. If
    there is nothing to plan, the end of that one is awaited.
    """
    lane, overheads, count = price.lane, price.overheads, len(lengths)
    ready = [inf] * count
    now, sent, started, groups = 0.0, 0, 0, list[tuple[float, float, list[int]]]()
    planned, ghosts = 0.0, 0

    def send(place: int, when: float) -> None:
        if not groups or groups[-1][0] != when:
            groups.append((when, max(when, groups[-1][1] if groups else 0.0), []))
        arrival, front_end, members = groups.pop()
        groups.append((arrival, front_end + overheads.entry, [*members, place]))
        for each in groups[-1][2]:
            ready[each] = groups[-1][1] + overheads.request

    for place in range(count if arrivals is not None else min(concurrency, count)):
        send(place, arrivals[place] if arrivals is not None else 0.0)
        sent += 1
    queue: list[int] = []
    prompts: dict[int, float] = {}
    generated = [0] * count
    running: list[int] = []
    first, last = [0.0] * count, [0.0] * count
    while any(generated[place] < lengths[place][1] for place in range(count)):
        if not lane.ahead or not (running or prompts or queue or ready[started] <= planned):
            planned, ghosts = now, 0
        while started < sent and ready[started] <= planned:
            queue.append(started)
            started += 1
        left = lane.budget - (len(running) * (1.0 + lane.drafted) if lane.mixes else 0)
        tokens, pairs, longest, ended = 0.0, 0.0, 0.0, []
        while left > 0 and (prompts or (queue and len(running) + len(prompts) + len(ended) + ghosts < lane.running)):
            if not prompts:
                prompts[queue.pop(0)] = 0.0
            place = next(iter(prompts))
            piece = min(left, lengths[place][0] - prompts[place])
            pairs += piece * (prompts[place] + 0.5 * piece)
            prompts[place] += piece
            tokens, left, longest = tokens + piece, left - piece, max(longest, piece)
            if prompts[place] >= lengths[place][0]:
                ended.append(place)
                del prompts[place]
        if not tokens and not running:
            planned, ghosts, now = now, 0, now if queue else ready[started]
            continue
        decodes, planned = running if lane.mixes or not tokens else [], now
        context = sum(lengths[place][0] + generated[place] for place in decodes)
        now += lane.gain * price.cached(len(decodes)) * context
        if tokens:
            now += price.mixed(len(decodes), tokens, longest, pairs, len(ended))
        else:
            now += lane.gain * price.decode(len(decodes))
        for place in list(decodes):
            generated[place] += int(lane.gain)
        for place in ended:
            generated[place], first[place] = 1, now
            running.append(place)
        done = [place for place in running if generated[place] >= lengths[place][1]]
        done.sort(key=lambda place: (place in ended, ended.index(place) if place in ended else 0))
        ghosts = len(done)
        order = [place for place in ended if place in done] + [place for place in done if place not in ended]
        for place in order:
            running.remove(place)
            last[place] = now
            if arrivals is None and sent < count:
                send(sent, now)
                sent += 1
    return list(zip(first, last, strict=True))


def ends(outcome: SimulatedRun) -> list[tuple[float, float]]:
    return [(request.first, request.end) for request in outcome.requests]


@pytest.mark.parametrize("drafted", [0.0, 2.0])
@pytest.mark.parametrize("ahead", [0.0, 1.0])
@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_jumping_over_decoding_is_the_same_as_going_token_by_token(
    seed: int, mixes: bool, ahead: float, drafted: float
) -> None:
    draw = random.Random(seed)
    lane = replace(LANE, budget=draw.choice([96.0, 512.0, 2048.0]), running=draw.choice([3.0, 64.0]), mixes=mixes)
    lane = replace(lane, ahead=ahead, drafted=drafted, gain=1.0 + drafted)
    lengths = [(draw.randint(1, 900), draw.randint(1, 40)) for _ in range(25)]
    arrivals = None if seed % 2 else sorted(draw.uniform(0.0, 1.0) for _ in lengths)
    price = price_of(lane, mixes=mixes)
    expected = token_by_token(price, lengths, arrivals, 6)
    for result, requested in zip(ends(Simulation(price, lengths, arrivals, 6).run()), expected, strict=True):
        assert result == pytest.approx(requested, rel=1e-9)


@pytest.mark.parametrize(("floor", "ranks"), [(0.0, 1.0), (0.02, 1.0), (1.0, 1.0), (0.0, 2.0), (0.02, 2.0)])
@pytest.mark.parametrize("mixes", [True, False])
def test_parallel_chunks_of_a_long_prompt_take_as_long_as_sequential_ones(
    mixes: bool, floor: float, ranks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = replace(times(), floor=np.array([floor]), pair=np.array([1e-7]))
    lane = replace(LANE, budget=96.0 * ranks, ranks=ranks, mixes=mixes)
    price = Price(costs, 0, lane, replace(OVER, mixes=mixes))
    lengths = [(50, 30), (20_000, 5), (300, 400), (9_000, 3)]
    at_once = Simulation(price, lengths, None, 3).run()
    monkeypatch.setattr(batches, "MIN_PIECES", 10**9)
    for result, expected in zip(ends(at_once), ends(Simulation(price, lengths, None, 3).run()), strict=True):
        assert result == pytest.approx(expected, rel=1e-9)


def test_one_request_takes_front_end_time_prompt_time_and_an_iteration_per_token() -> None:
    price = price_of()
    (request,) = Simulation(price, [(1000, 3)], None, 1).run().requests
    assert request.first == pytest.approx(6e-3 + price.mixed(0, 1000.0, 1000.0, 500e3, 1))
    assert request.end - request.first == pytest.approx(2 * price.decode(1) + price.cached(1) * (1001 + 1002))


@pytest.mark.parametrize(
    ("ranks", "running", "arrivals", "expected"),
    [
        (1.0, 64.0, [0.0, 0.0], [(2.0, 4.0), (3.0, 4.0)]),  # the first prompt takes two iterations, the second one
        (1.0, 1.0, [0.0, 0.0], [(2.0, 4.0), (5.0, 6.0)]),  # the second waits for the end of the first
        (1.0, 64.0, [0.0, 3.5], [(2.0, 4.0), (5.0, 6.0)]),  # it arrives in the fourth iteration, and joins the fifth
        (1.0, 64.0, None, [(2.0, 4.0), (5.0, 6.0)]),  # one after the other
        (2.0, 1.0, [0.0, 0.0], [(4.0, 6.0), (7.0, 8.0)]),  # a prompt is on one rank, which computes half of the tokens
    ],
)
def test_two_requests_worked_by_hand(
    ranks: float, running: float, arrivals: list[float] | None, expected: list[tuple[float, float]]
) -> None:
    """Iterations take a second, and up to 100 tokens: a prompt of 200 for 3 tokens, and one of 50 for 2."""
    costs, zero, one = times(), np.zeros(1), np.ones(1)
    tables = {name: 0.0 * getattr(costs, name) for name in ("local", "shared", "sampled")}
    costs = replace(costs, **tables, cached=zero, pair=zero, sequence=zero, floor=zero, fixed=one, crowding=one)
    price = Price(costs, 0, replace(LANE, budget=100.0, running=running, ranks=ranks), UNFITTED)
    assert ends(Simulation(price, [(200, 3), (50, 2)], arrivals, 1).run()) == [*map(pytest.approx, expected)]


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_a_small_cache_preempts_sequences_and_all_are_answered(ahead: float) -> None:
    lengths = [(200, 300)] * 8
    large_cache, small_cache = (
        Simulation(price_of(replace(LANE, cache_tokens=room, ahead=ahead)), lengths, [0.0] * 8, 8).run()
        for room in (1e9, 2000.0)
    )
    assert large_cache.preemptions == 0
    assert small_cache.preemptions > 0
    assert all(request.made == 300 and request.end > request.first for request in small_cache.requests)
    assert small_cache.duration > large_cache.duration


def test_a_preempted_sequence_finds_the_blocks_that_no_other_has_taken() -> None:
    again = [
        Simulation(price_of(replace(LANE, cache_tokens=cache, finds=finds)), [(160, 33)] * 2, [0.0] * 2, 2).run()
        for cache, finds in ((22 * 16.0, False), (22 * 16.0, True), (13 * 16.0, True))
    ]
    assert [each.preemptions for each in again] == [1, 1, 0]
    assert again[1].duration < again[0].duration
    price = price_of(replace(LANE, cache_tokens=20 * 16.0))
    lost, found = (
        Simulation(price_of(replace(price.lane, finds=finds)), [(150, 20), (150, 33)], [0.0] * 2, 2).run().duration
        for finds in (False, True)
    )
    whole, rest = (price.mixed(0, tokens, tokens, tokens * (161.0 - 0.5 * tokens), 1) for tokens in (161.0, 17.0))
    assert lost - found == pytest.approx(whole - rest)  # 9 of its 10 blocks: the other sequence took the last one


@pytest.mark.parametrize(("blocks", "preemptions"), [(4, 0), (3, 1)])
@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_sequences_take_whole_blocks_but_none_for_the_last_token(blocks: int, preemptions: int, ahead: float) -> None:
    lane = replace(LANE, cache_tokens=16.0 * blocks, ahead=ahead)
    assert Simulation(price_of(lane), [(16, 17)] * 2, [0.0] * 2, 2).run().preemptions == preemptions


def test_an_arrival_is_seen_in_time_though_iterations_grow() -> None:
    price = Price(replace(times(), cached=np.array([1e-5])), 0, LANE, OVER)
    late = Simulation(price, [(1, 2_000), (1, 2)], [0.0, 20.0], 2).run().requests[1]
    assert late.ttft_s < 0.1


def test_preempted_sequences_of_a_pipeline_wait_for_a_slot_of_their_adapter() -> None:
    lane = replace(LANE, cache_tokens=320.0, stages=4.0, adapters=2.0)
    lengths = [(60, 40 + 9 * place) for place in range(12)]
    pipeline = Simulation(price_of(lane), lengths, None, 4, adapters=[0, 1, 2] * 4)
    outcome = pipeline.run()
    assert outcome.preemptions > 0
    assert all(request.made == request.output for request in outcome.requests)
    assert pipeline.used == 0.0


def test_a_pipeline_ends_whatever_the_rounding_of_its_times() -> None:
    lane, over = replace(LANE, stages=3.0, ahead=1.0), replace(OVER, mixes=False)
    price = Price(replace(times(), floor=np.array([0.02])), 0, lane, over)
    assert not Simulation(price, [(1, 1)], [0.0], 1).run(lambda now: True).is_stopped


@pytest.mark.parametrize(("sent", "waits"), [(0.1, True), (1.0, False)])
def test_a_reserve_falls_but_after_a_refusal_no_request_is_admitted_until_one_ends(sent: float, waits: bool) -> None:
    price = price_of(replace(LANE, cache_tokens=800.0, block=1.0), reserve=1.0, falls=0.01, least=0.1)
    first, _, last = Simulation(price, [(100, 200)] * 3, [0.0, 0.0, sent], 3).run().requests
    assert (last.first > first.end) is waits


def test_after_a_retraction_the_reserve_is_what_sequences_have_generated() -> None:
    lane = replace(LANE, cache_tokens=500.0, block=1.0)
    run = Simulation(price_of(lane, reserve=0.1, falls=0.01, least=0.1), [(100, 200)] * 2, [0.0] * 2, 2)
    assert (run.run().preemptions, run.reserve) == (1, pytest.approx((150 + 20) / 201, rel=0.01))


@pytest.mark.parametrize(("ranks", "waits"), [(1.0, True), (2.0, False)])
def test_ranks_may_reserve_a_smaller_share(ranks: float, waits: bool) -> None:
    price = price_of(replace(LANE, cache_tokens=800.0, block=1.0, ranks=ranks), reserve=1.0, reserve_of_ranks=0.3)
    first, _, last = Simulation(price, [(100, 200)] * 3, [0.0] * 3, 3).run().requests
    assert (last.first > first.end) is waits


@pytest.mark.parametrize(
    ("over", "prompt", "preempted", "last"),
    [
        *[({}, 150, 0, 2), ({"reserved": 50.0}, 150, 1, 2)],
        *[({"reserved": 50.0, "preempted_last": True}, prompt, 1, last) for prompt, last in ((150, 1), (100, 2))],
    ],
)
def test_a_part_of_long_answers_is_reserved_and_the_shortest_sequence_is_preempted(
    over: dict[str, Any], prompt: int, preempted: int, last: int
) -> None:
    lane, lengths = replace(LANE, cache_tokens=700.0, block=1.0), [(100, 200), (prompt, 200), (100, 200)]
    run = Simulation(price_of(lane, reserve=1.0, **over), lengths, [0.0] * 3, 3).run()
    assert (run.preemptions, int(np.argmax([each.end for each in run.requests]))) == (preempted, last)


@pytest.mark.parametrize("block", [1.0, 16.0])
def test_requests_that_run_at_once_share_the_parts_of_their_prompts(block: float) -> None:
    lane, lengths, hits = replace(LANE, cache_tokens=1024.0, block=block), [(600, 40)] * 4, [0.0, *[512.0] * 3]
    runs = [
        Simulation(price_of(lane), lengths, [0.0, 0.1, 0.1, 0.1], 4, hits, parts=parts).run().requests
        for parts in ((), [[(0, 512)]] * 4, [[(each, 512)] for each in range(4)])
    ]
    assert max(each.first for each in runs[1]) < runs[1][0].end
    assert [each.end for each in runs[0]] == [each.end for each in runs[2]]
    assert min(each.first for each in runs[0][1:]) > runs[0][0].end


def test_an_engine_that_polls_rarely_delays_requests() -> None:
    lengths = [(64, 400), (64, 2)]
    often, rarely = (Simulation(price_of(receive=each), lengths, [0.0, 0.05], 2).run() for each in (1, 40))
    assert rarely.requests[1].first > often.requests[1].first


def joining(place: float = 0.01, **lane: float) -> float:
    """Return how many iterations of decoding pass between a request that is ready and the start of its prompt. `place`:
    the part of an iteration that has passed when it is ready."""
    price = price_of(replace(LANE, **lane), request=0.0, entry=0.0)
    alone = Simulation(price, [(1, 40)], [0.0], 1).run().requests[0]
    token_s = (alone.end - alone.first) / 39
    sent = alone.first + (10.0 + place) * token_s * price.lane.gain
    late = Simulation(price, [(1, 400), (1, 2)], [0.0, sent], 2).run().requests[1]
    return (late.first - price.mixed(1, 1.0, 1.0, 0.5, 1) - late.arrival) / (token_s * price.lane.gain)


def test_a_request_waits_for_the_batch_that_is_planned_already() -> None:
    assert 0.9 < joining() < 1.1
    assert 1.9 < joining(ahead=1.0) < 2.1


def call_by_call(
    price: Price, lengths: list[tuple[int, int]], arrivals: list[float] | None, concurrency: int
) -> list[tuple[float, float]]:
    """First and last token of each request, of a scheduler with a queue of batches for pipeline stages. All that is
    ready may be in a batch, but a sequence only in every batch number `stages` (vLLM 0.33 `v1/engine/core.py`:
    step_with_batch_queue, `v1/core/sched/async_scheduler.py`)."""
    lane, count, stages = price.lane, len(lengths), int(price.lane.stages)
    sent = list(arrivals if arrivals is not None else [0.0] * concurrency)
    free, ends, calls, now = [0.0] * stages, list[float](), 0, 0.0
    computed, made, turn = [0] * count, [0] * count, [-1] * count
    first, last = [0.0] * count, [0.0] * count
    while any(made[place] < lengths[place][1] for place in range(count)):
        if len(ends) >= stages + lane.ahead:
            now = max(now, ends[-int(stages + lane.ahead)])
        ready = [place for place in range(len(sent)) if sent[place] <= now and made[place] < lengths[place][1]]
        if not ready and now >= free[-1]:
            now, ends = min(when for place, when in enumerate(sent) if not made[place]), []
            continue
        decodes = [place for place in ready if turn[place] == calls % stages]
        left, prompts, ended = lane.budget - len(decodes) * (1 + lane.drafted), list[tuple[int, float]](), list[int]()
        busy = sum(
            computed[place] > 0 and (made[place] < lengths[place][1] or last[place] > now) for place in range(count)
        )
        for place in (place for place in ready if turn[place] < 0):
            is_full = busy >= lane.running or len(decodes) + len(prompts) >= lane.group
            if left <= 0 or (not computed[place] and is_full):
                break
            busy += not computed[place]
            piece = min(left, lengths[place][0] - computed[place])
            prompts.append((int(piece), piece * (computed[place] + 0.5 * piece)))
            computed[place] += int(piece)
            left -= piece
            if computed[place] == lengths[place][0]:
                ended.append(place)
        time = lane.gain * price.cached(len(decodes)) * sum(lengths[place][0] + made[place] for place in decodes)
        if prompts:
            tokens, pairs = (float(sum(each)) for each in zip(*prompts, strict=True))
            time += price.mixed(len(decodes), tokens, max(prompts)[0], pairs, len(ended))
        elif decodes:
            time += lane.gain * price.decode(len(decodes))
        end = max([now, *(last[place] for place in decodes)])
        for stage in range(stages if time else 0):
            end = free[stage] = max(end, free[stage]) + time / stages
        for place in (*ended, *decodes):
            first[place], last[place] = first[place] or end, end
            made[place], turn[place] = made[place] + (1 if place in ended else int(lane.gain)), calls % stages
            if made[place] >= lengths[place][1] and len(sent) < count:
                sent.append(end)
        ends.append(end)
        calls += 1
    return list(zip(first, last, strict=True))


@pytest.mark.parametrize("ahead", [0.0, 1.0])
@pytest.mark.parametrize("stages", [2.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_uneven_groups_take_turns_in_a_pipeline(seed: int, stages: float, ahead: float) -> None:
    draw = random.Random(seed)
    lane = replace(
        LANE, budget=draw.choice([256.0, 2048.0]), running=draw.choice([4.0, 64.0]), stages=stages, ahead=ahead
    )
    lane = replace(lane, drafted=2.0, gain=3.0) if seed > 1 else replace(lane, group=2.0 + 60.0 * seed)
    lengths = [(draw.randint(1, 900), draw.randint(1, 80)) for _ in range(30)]
    arrivals = None if seed % 2 else sorted(draw.uniform(0.0, 1.0) for _ in lengths)
    price = price_of(lane, request=0.0, entry=0.0)
    expected = call_by_call(price, lengths, arrivals, 6)
    found = ends(Simulation(price, lengths, arrivals, 6).run())
    assert np.array(found) == pytest.approx(np.array(expected), rel=2e-3)


def test_long_answers_of_a_pipeline_are_computed_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    price = price_of(replace(LANE, stages=4.0, ahead=1.0, cache_tokens=24_000.0))
    lengths = [(500 + 40 * place, 2_000 + 20 * place) for place in range(12)]
    found = ends(Simulation(price, lengths, None, 8).run())
    monkeypatch.setattr(simulation, "STEADY_TURNS", 1 << 60)
    assert np.array(found) == pytest.approx(np.array(ends(Simulation(price, lengths, None, 8).run())), rel=1e-4)


def test_a_batch_that_is_planned_ahead_has_all_drafts_of_the_one_before() -> None:
    waits = [joining(drafted=3.0, gain=2.5, ahead=each) for each in (0.0, 1.0)]
    assert 0.8 < waits[1] - waits[0] < 1.3


def test_equal_answers_with_drafts_do_not_end_together() -> None:
    """Otherwise all prompts but the first ones of a closed loop come at once, and wait for each other."""
    load = SimulatedLoad.draw(Load(input_len=1024, output_len=512, num_prompts=64, concurrency=16))
    plain, drafted = (
        load.figures(price_of(replace(LANE, **given), mixes=False), 1, {})
        for given in ({}, {"drafted": 3.0, "gain": 2.5})
    )
    assert drafted["ttft_s.p50"] < 0.7 * plain["ttft_s.p50"]
    assert drafted["ttft_s.p99"] > drafted["ttft_s.p50"]


def test_an_ended_request_keeps_its_slot_and_its_cache_for_an_iteration() -> None:
    lengths = [(64, 20), (64, 40), (64, 20)]
    for limit in ({"running": 2.0}, {"cache_tokens": 180.0, "block": 1.0}):
        now, ahead = (
            Simulation(price_of(replace(LANE, ahead=each, **limit)), lengths, [0.0] * 3, 3).run().requests
            for each in (0.0, 1.0)
        )
        token_s = (now[0].end - now[0].first) / 19
        assert now[0].end == pytest.approx(ahead[0].end)
        assert ahead[2].first - now[2].first == pytest.approx(token_s, rel=0.2)


def test_an_end_is_known_an_iteration_later_whatever_the_rounding_of_times() -> None:
    price = price_of(replace(LANE, running=2.0, ahead=1.0), entry=0.0)
    _, *answers = Simulation(price, [(8, 4000), *[(8, 3)] * 150], [0.0] * 151, 1).run().requests
    waits = [after.first - before.end for before, after in pairwise(answers)]
    assert max(waits) < 1.1 * min(waits)


def test_a_prompt_waits_for_the_cache_that_it_needs_while_it_is_computed() -> None:
    lane = replace(LANE, cache_tokens=250.0, block=1.0)
    (_, now), (first, late) = (
        Simulation(price_of(replace(lane, admits=each)), [(100, 5)] * 2, [0.0] * 2, 2).run().requests
        for each in (0.0, 100.0)
    )
    assert now.first < first.end <= late.first


def test_pieces_of_a_prompt_are_a_multiple_of_the_chunk() -> None:
    """Of 500 tokens, 250 and 250 in two iterations, or 200, 200 and 100."""
    two, three, same = (
        Simulation(price_of(replace(LANE, budget=budget, chunk=chunk)), [(500, 1)], [0.0], 1).run().duration
        for budget, chunk in ((250.0, 0.0), (250.0, 100.0), (200.0, 0.0))
    )
    assert two < three == pytest.approx(same)


def test_a_shared_prefix_is_not_computed_again() -> None:
    plain, shared = (
        Simulation(price_of(replace(LANE, shared_prefix=prefix)), [(1000, 2)] * 8, [0.0] * 8, 8).run()
        for prefix in (0.0, 900.0)
    )
    assert shared.duration < 0.7 * plain.duration


@pytest.mark.parametrize("mixes", [True, False])
def test_gaps_are_all_tokens_after_the_first_and_the_time_between(mixes: bool) -> None:
    lane = replace(LANE, mixes=mixes, budget=512.0)
    found = Simulation(price_of(lane, mixes=mixes), [(400, 30 + 10 * (each % 3)) for each in range(12)], None, 8).run()
    assert sum(count for _, count in found.gaps) == sum(each.output - 1 for each in found.requests)
    waited = sum(each.end - each.first for each in found.requests)
    assert sum(gap * count for gap, count in found.gaps) == pytest.approx(waited)


def test_text_prompts_wait_for_the_tokenizer_one_after_the_other() -> None:
    lengths = [(1000, 1), (500, 1), (1000, 1)]
    first = [each.first for each in Simulation(price_of(prompt_token=1e-2), lengths, [0.0] * 3, 3).run().requests]
    assert [later - earlier for earlier, later in pairwise(first)] == pytest.approx([5.0, 10.0], rel=0.02)
    assert first[0] == pytest.approx(10.0, rel=0.02)


LENGTHS = [(512, 64)] * 96


def run(
    lengths: list[tuple[int, int]],
    arrivals: list[float] | None,
    concurrency: int = 1,
    *,
    per_decode: float = 1.0,
    transfer: float = 0.0,
    lane: Lane = LANE,
) -> SimulatedRun:
    prefill = Prefill(price=price_of(), per_decode=per_decode, transfer=transfer)
    return Disaggregated(price_of(lane), prefill, lengths, arrivals, concurrency).run()


def rate(outcome: SimulatedRun) -> float:
    return len(outcome.requests) / outcome.duration


def test_a_lone_request_passes_through_all_stages_once() -> None:
    (request,) = run([(512, 3)], [1.0], transfer=1e-3).requests
    front = 2.0 * OVER.request + OVER.entry
    prefill = price_of().mixed(0, 512.0, 512.0, 0.5 * 512.0**2, 1)
    first = 1.0 + front + prefill + 512 * 1e-3 + price_of().decode(1) + price_of().cached(1) * 512
    assert request.first == pytest.approx(first, rel=1e-3)
    assert request.end > request.first
    assert request.made == 3


def test_prompts_do_not_delay_answers() -> None:
    """A prompt of 16,384 tokens arrives while another answer is decoded."""
    lengths, arrivals = [(64, 400), (16_384, 2)], [0.0, 0.02]
    both = Simulation(price_of(), lengths, arrivals, 2).run()
    apart = run(lengths, arrivals)
    alone = run(lengths[:1], arrivals[:1])
    assert max(gap for gap, _ in apart.gaps) < 2.0 * max(gap for gap, _ in alone.gaps)
    assert max(gap for gap, _ in both.gaps) > 3.0 * max(gap for gap, _ in apart.gaps)


def test_the_slower_side_limits_the_rate() -> None:
    tokens = LANE.budget // 512 * 512
    limit = (tokens / 512) / price_of().mixed(0, tokens, 512.0, tokens / 512 * 0.5 * 512**2, int(tokens / 512))
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


def loop(costs: IterationCosts, flight: float, prompt: float, output: float, cache: float) -> ClosedLoop:
    sizes = {"flight": flight, "prompt": prompt, "output": output, "cache_tokens": cache}
    limits = {"budget": 8192.0, "running": 512.0, "ranks": 1.0, "stages": 1.0}
    columns = {name: np.array([value]) for name, value in {**sizes, **limits}.items()}
    return ClosedLoop(costs=costs, overheads=serving_inputs.OVER, **columns)


@pytest.mark.parametrize(
    ("flight", "prompt", "output", "cache"),
    [(1, 512, 128, 1e9), (16, 1024, 512, 1e9), (64, 1024, 256, 1e9), (64, 4096, 256, 1e9), (64, 1024, 512, 40e3)],
)
def test_closed_form_is_near_the_simulation(flight: int, prompt: int, output: int, cache: float) -> None:
    costs, draw = times(), random.Random(0)
    lane = Lane(budget=8192.0, running=512.0, cache_tokens=cache)
    lengths = [
        (round(prompt * draw.uniform(0.9, 1.1)), round(output * draw.uniform(0.9, 1.1))) for _ in range(12 * flight)
    ]
    price = Price(costs, 0, lane, replace(UNFITTED, request=serving_inputs.OVER.request))
    requests = Simulation(price, lengths, None, flight).run().requests[2 * flight :]
    tpot = np.mean([(each.end - each.first) / (each.output - 1) for each in requests])
    rate = flight * output / np.mean([each.end - each.arrival for each in requests])
    found = steady_state(loop(costs, flight, prompt, output, cache))
    assert found.tpot[0] == pytest.approx(tpot, rel=0.12)
    assert found.rate[0] == pytest.approx(rate, rel=0.12)


def test_a_simulation_stops_once_enough_requests_exceed_a_limit() -> None:
    lengths, arrivals = [(200, 20)] * 400, [0.05 * place for place in range(400)]
    whole = Simulation(price_of(), lengths, arrivals, 400).run()
    waits = sorted(each.first - each.arrival for each in whole.requests)
    for limit, is_stopped in ((0.5 * waits[0], True), (waits[-1], False)):
        run = Simulation(price_of(), lengths, arrivals, 400)
        found = run.run(SimulationCheck({"ttft_s.p50": limit}, run.requests).has_failed)
        assert found.is_stopped is is_stopped
        started = sum(each.first >= 0.0 for each in found.requests)
        assert 200 < started < 300 if is_stopped else started == 400


def test_prompts_of_prefill_instances_are_divided_among_all_ranks() -> None:
    one, many = (loop(times(), 64.0, 1024.0, 256.0, 1e9) for _ in range(2))
    many = many._replace(ranks=np.array([4.0]), budget=4.0 * many.budget)
    slow, fast = (float(steady_state(each._replace(role=np.array([1]))).rate[0]) for each in (one, many))
    assert fast > 2.0 * slow
