"""The search for the highest load that meets limits, and loads that do not end in their time. Metrics of answers that
are made by hand, and the steady state of simulated and real loads."""

import asyncio
import heapq
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.figures import (
    BATCHES,
    CUT_ERROR,
    MIN_COUNTED,
    SteadyState,
    Window,
    cut,
    decode_error,
    duration_s,
    figures_of,
    goodput,
    statistics_of,
    steady_figures,
)
from flagcore_serving.load.progress import RESOLUTION, LimitCheck, RateCheck, Verdict, completions_per_s, highest_load
from flagcore_serving.load.result import Answer, LoadResult, MinRate
from flagcore_serving.load.sending import Meter

from engines.serving.tests.load.servers import Behaviour, Body, Wire, answer, finish, pieces, send, serving, well
from tests.checks import given


def limited_by(highest: float, untested_to: float = 0.0) -> tuple[list[float], Callable[[float], Verdict]]:
    """Return the loads that were tested, and a test. After the first load, those up to `untested_to` have no time."""
    tried: list[float] = []

    def test(load: float) -> Verdict:
        if tried and load <= untested_to:
            return Verdict.UNTESTED
        tried.append(load)
        return Verdict.MET if load <= highest else Verdict.EXCEEDED

    return tried, test


@pytest.mark.parametrize("start", [0.01, 3.0, 40.0, 57.0, 60.0, 9000.0])
@pytest.mark.parametrize("true", [0.02, 57.3, 999.0])
def test_it_is_found_within_its_resolution(start: float, true: float) -> None:
    tried, meets_limit = limited_by(true)
    found = given(highest_load(meets_limit, start, minimum=0.001, maximum=10_000))
    assert true / RESOLUTION <= found <= true
    assert len(set(tried)) == len(tried) <= 20
    if 0.5 < start / true < 2:
        assert len(tried) <= 7


@pytest.mark.parametrize("true", [1, 2, 3, 7, 64, 127, 128])
def test_clients_are_whole_numbers(true: int) -> None:
    tried, meets_limit = limited_by(true)
    found = given(highest_load(meets_limit, 5.0, minimum=1, maximum=128, is_integer=True))
    assert true / RESOLUTION - 1 < found <= true
    assert len(set(tried)) == len(tried)
    assert all(load == round(load) for load in tried)


@pytest.mark.parametrize(("true", "found", "tested"), [(1000, 64.0, (8.0, 64.0)), (0, None, (1.0, 8.0))])
def test_the_range_is_not_left(true: float, found: float | None, tested: tuple[float, float]) -> None:
    tried, test = limited_by(true)
    assert highest_load(test, 8.0, minimum=1, maximum=64, is_integer=True) == found
    assert (min(tried), max(tried)) == tested


@pytest.mark.parametrize(
    ("start", "untested_to", "headroom", "found"),
    [
        (10.0, 25.0, 3.0, 50.0),  # higher loads than those without time are tested, as far as the headroom suggests
        (10.0, 25.0, 2.0, 10.0),
        (10.0, math.inf, 3.0, 10.0),
        (90.0, 30.0, 1.0, 50.0),
        (90.0, 80.0, 1.0, None),
    ],
)
@pytest.mark.parametrize("is_integer", [False, True])
def test_loads_without_time_are_left_out(
    start: float, untested_to: float, headroom: float, found: float | None, is_integer: bool
) -> None:
    tried, test = limited_by(50.0, untested_to)
    best = highest_load(test, start, minimum=1, maximum=1000, is_integer=is_integer, headroom=lambda: headroom)
    assert best == found or (best and found and found / RESOLUTION - is_integer <= best <= found)
    assert len(set(tried)) == len(tried) <= 10


@pytest.mark.parametrize("figure", ["ttft_s.mean", "ttft_s.p50", "ttft_s.p90", "ttft_s.p99"])
@pytest.mark.parametrize("count", [1, 2, 10, 101, 150])
def test_a_load_is_stopped_only_if_its_limit_is_certain_to_be_exceeded(figure: str, count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        seconds = rng.gamma(1.0, 1.0, size=count)
        limit = float(rng.uniform(0.1, 3.0))
        check = LimitCheck({figure: limit, "itl_s.p99": 1e-9}, count)
        stopped = next(
            (place for place, each in enumerate(seconds) if check.exceeded(answer(ttft=each, gaps=(0.01,)))), math.inf
        )
        statistic = statistics_of(seconds)[figure.partition(".")[2]]
        if stopped < count:
            assert statistic > limit


@pytest.mark.parametrize(("figure", "late"), [("ttft_s.p90", 11), ("e2e_s.p50", 51), ("ttft_s.mean", 51)])
def test_requests_that_wait_for_longer_than_the_limit_count_before_they_are_answered(figure: str, late: int) -> None:
    check, name = LimitCheck({figure: 1.0}, 101), figure.partition(".")[0]
    assert not check.is_exceeded({name: [1.99] * (late - 1)})
    assert check.is_exceeded({name: [1.99] * late, "ttft_s" if name == "e2e_s" else "e2e_s": []})
    assert not check.is_exceeded({})


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    check = LimitCheck({"tpot_s.mean": 0.001}, 2)
    assert not check.exceeded(answer(gaps=()))
    assert check.exceeded(answer(gaps=(0.1,)))


@pytest.mark.parametrize(
    ("start", "option", "second"),
    [
        (10.0, lambda tried: {"headroom": lambda: (50.0 / tried[-1]) ** 2}, 30.0),  # a load far below its limits
        (900.0, lambda tried: {"capacity": lambda: 55.0}, 55.0),  # the rate of an overloaded server
    ],
)
def test_the_next_load_follows_from_the_figures_of_the_last_one(start: float, option: Any, second: float) -> None:
    tried, meets_limit = limited_by(50.0)
    found = given(highest_load(meets_limit, start, minimum=1, maximum=1000, **option(tried)))
    assert 50.0 / RESOLUTION <= found <= 50.0
    assert tried[1] == second
    assert len(tried) <= (8 if start < 50.0 else 6)


def test_the_rate_of_completions_is_that_between_the_first_and_the_last_end() -> None:
    answers = [answer(start) for start in (0.0, 4.0, 2.0)]
    assert completions_per_s(answers) == pytest.approx(0.5)
    assert completions_per_s(answers[:1]) == completions_per_s([]) == math.inf


TOKENS, FLIGHT, REQUESTS = 64, 16, 512


def closed_loop(spread: float, count: int = REQUESTS) -> list[Answer]:
    """Return the answers of a server whose answers take 1 s on average, FLIGHT at once."""
    rng, slots, answers = np.random.default_rng(3), [0.0] * FLIGHT, []
    for _ in range(count):
        start, e2e = heapq.heappop(slots), float(rng.uniform(1.0 - spread, 1.0 + spread))
        answers.append(answer(start, 0.1 * e2e, (0.9 * e2e / (TOKENS - 1),) * (TOKENS - 1)))
        heapq.heappush(slots, start + e2e)
    return answers


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seconds", [1.5, 2.5, 5.1, 12.0])
def test_the_figures_of_a_load_that_was_cut_are_those_of_the_whole(spread: float, seconds: float) -> None:
    whole = closed_loop(spread)
    sent = [each for each in whole if each.start_s < seconds]
    answered = [each for each in sent if each.end_s <= seconds]
    window = given(cut(answered, min((each.start_s for each in sent if each.end_s > seconds), default=seconds), FLIGHT))
    assert window.error >= CUT_ERROR
    expected, found = figures_of(whole), steady_figures(answered, window)
    for name in ("output_tokens_per_s", "requests_per_s", "ttft_s.mean", "e2e_s.p50"):
        assert found[name] == pytest.approx(expected[name], rel=0.15 if spread == 0.3 and seconds < 3 else 0.06)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(("ratio", "is_slow"), [(0.5, False), (0.95, False), (2.0, True)])
def test_a_load_whose_rate_is_certain_to_be_too_low_is_slow(spread: float, ratio: float, is_slow: bool) -> None:
    answers = sorted(closed_loop(spread), key=lambda each: each.end_s)
    for name, rate in (("requests_per_s", FLIGHT), ("output_tokens_per_s", FLIGHT * TOKENS)):
        check = RateCheck(MinRate(name, ratio * rate), FLIGHT, REQUESTS)
        slow = [count for count in range(1, REQUESTS + 1) if check.is_below(answers[:count])]
        assert bool(slow) == is_slow
        assert not slow or slow[0] >= REQUESTS / 4


def test_fast_answers_alone_give_no_figures() -> None:
    whole = closed_loop(0.3)
    first = [each for each in whole if each.end_s <= 0.9]
    assert first
    assert cut(first, 0.0, FLIGHT) is None
    assert cut(whole[: FLIGHT - 1], 1.0, FLIGHT) is None


def sent(behaviour: Behaviour, timeout_s: float, fewest: int, share_s: float = 1e9, **changes: Any) -> LoadResult:
    with serving(behaviour) as served:
        load = Load(input_len=8, output_len=4, **changes)
        return send(served.url, load=load, timeout_s=timeout_s, fewest=fewest, share_s=share_s)


async def answers_in_10_ms(body: Body, wire: Wire) -> None:
    await asyncio.sleep(0.01)
    await wire.head()
    await pieces(body["max_tokens"], wire)
    await finish(body, wire)


def test_a_load_ends_after_its_time_with_the_requests_so_far() -> None:
    result = sent(well, 600.0, 8, share_s=0.2, num_prompts=5000, concurrency=4)
    assert (result.problems, result.failed) == ((), 0)
    assert 8 <= result.completed < 5000
    assert result.figures["output_tokens_per_s"] == pytest.approx(4 * result.figures["requests_per_s"])
    assert result.error >= CUT_ERROR
    assert given(result.progress).requests == 5000


def test_a_load_whose_first_requests_take_too_long_ends_at_once() -> None:
    result = sent(answers_in_10_ms, 20.0, sys.maxsize, num_prompts=10_000, concurrency=1)
    assert result.problems[0].startswith("timed out")
    assert result.duration_s < 15.0
    assert result.progress is not None
    assert result.progress.answered >= 1
    assert given(result.progress.all_s) > 30.0
    assert not result.figures


def test_requests_that_arrive_too_late_are_not_waited_for() -> None:
    result = sent(well, 20.0, 8, num_prompts=100, concurrency=None, request_rate=0.1)
    assert result.failed == 100
    assert result.duration_s < 15.0
    assert given(result.progress).all_s == pytest.approx(990.0)


def result(*answers: Answer) -> LoadResult:
    return LoadResult(
        figures=figures_of(answers), duration_s=duration_s(answers), completed=len(answers), failed=0, requests=answers
    )


def test_rates_are_taken_from_the_first_send_to_the_last_finish() -> None:
    figures = figures_of([answer(2.0), answer(3.0), answer(9.0)])
    assert figures["output_tokens_per_s"] == pytest.approx(9 / 10)
    assert figures["total_tokens_per_s"] == pytest.approx(39 / 10)
    assert figures["requests_per_s"] == pytest.approx(3 / 10)


def test_latencies_have_a_value_per_request_and_gaps_are_pooled() -> None:
    figures = figures_of([answer(ttft=1.0, gaps=(1.0,)), answer(ttft=3.0, gaps=(0.0, 0.0, 0.0))])
    assert figures["ttft_s.mean"] == figures["ttft_s.p50"] == 2.0
    assert figures["ttft_s.p90"] == pytest.approx(2.8)
    assert figures["tpot_s.mean"] == 0.5
    assert figures["itl_s.mean"] == 0.25
    assert figures["e2e_s.p99"] == pytest.approx(2.99)


def test_an_answer_of_one_token_counts_for_the_first_token_only() -> None:
    figures = figures_of([answer(gaps=()), answer(1.0, gaps=())])
    assert not [name for name in figures if name.startswith(("tpot_s", "itl_s"))]
    assert figures["ttft_s.p50"] == 1.0
    assert figures_of([answer(gaps=()), answer()])["tpot_s.mean"] == 1.0


def slots(count: int, waves: int, gap: float) -> list[Answer]:
    """Return answers of 1 s to the first and 3 further tokens, in `count` slots one after the other."""
    length = 1.0 + 3 * gap
    return [answer(wave * length + slot * 0.01, gaps=(gap,) * 3) for wave in range(waves) for slot in range(count)]


def test_a_steady_state_leaves_out_the_first_wave_and_the_tail() -> None:
    tail = [*slots(2, 10, 1.0), answer(36.5, ttft=1.0, gaps=(30.0,) * 3)]
    figures = steady_figures(tail, Window(begin_s=4.0, end_s=36.0, error=0.0))
    assert figures["output_tokens_per_s"] == pytest.approx(2 * 4 / 4.0, rel=0.05)
    assert figures["requests_per_s"] == pytest.approx(0.5, rel=0.05)
    assert figures["e2e_s.p99"] == pytest.approx(4.0)


VARIED = [answer(), answer(ttft=5.0), answer(gaps=(4.0, 4.0)), answer(6.0)]


@pytest.mark.parametrize(
    ("answers", "slo", "requests_per_s"),
    [
        (VARIED, {"ttft_s.p99": 2.0, "tpot_s.p99": 2.0}, 2 / 9),
        (VARIED, {"ttft_s": 2.0}, 3 / 9),
        (VARIED, {"e2e_s.p50": 3.0}, 2 / 9),
        (VARIED, {}, 4 / 9),
        ([answer()], {"ttft_s.p99": 1.0}, 1 / 3),  # exactly at the limit
        ([answer()], {"ttft_s.p50": 0.5, "ttft_s.p99": 1.5}, 1 / 3),  # the widest limit applies to a request
        ([answer()], {"output_tokens_per_s": 0.0}, 1 / 3),  # a rate is not that of a request
        ([answer(gaps=(1.0, 1.0, 4.0))], {"itl_s.mean": 2.0, "itl_s.p50": 1.0}, 1 / 7),  # the request's own gaps
        ([answer(gaps=(1.0, 1.0, 4.0))], {"itl_s.p99": 3.0}, 0.0),
        ([answer(gaps=())], {"tpot_s.p99": 0.0, "itl_s.p99": 0.0}, 1.0),  # one token has no time between tokens
    ],
)
def test_goodput_counts_requests_that_keep_all_limits_a_second(
    answers: Sequence[Answer], slo: dict[str, float], requests_per_s: float
) -> None:
    assert goodput(result(*answers), slo) == pytest.approx(requests_per_s)


def test_child_processes_of_the_client_are_not_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, tree = iter([100.0, 105.0]), iter([10.0, 14.0])
    clock = iter([0.0, 2.0])
    monkeypatch.setattr("flagcore_serving.load.sending._busy_s", lambda: next(busy))
    monkeypatch.setattr("flagcore_serving.load.sending._process_tree_s", lambda: next(tree))
    monkeypatch.setattr("flagcore_serving.load.sending.time.perf_counter", lambda: next(clock))
    assert Meter().figures()["others_cores"] == pytest.approx(0.5)


def answers(e2e_s: list[float], every_s: float = 1.0) -> list[Answer]:
    """Return the answers to requests that are sent one after the other."""
    return [answer(index * every_s, seconds / 2, (seconds / 2,)) for index, seconds in enumerate(e2e_s)]


def test_the_slow_start_of_an_open_loop_does_not_count() -> None:
    sent = answers([10.0 * 0.8**index + 1.0 for index in range(40)] + [1.0, 1.1] * 80)
    window = given(SteadyState(("e2e_s.mean",), None).window(sent, 1000.0))
    assert 10 <= window.begin_s <= 60
    assert np.mean([each.e2e_s for each in window.counted(sent)]) == pytest.approx(1.05, rel=0.02)


def test_the_first_wave_of_a_closed_loop_does_not_count() -> None:
    window = given(SteadyState(("ttft_s.p50",), 32).window(answers([1.0] * 200), 150.0))
    assert (window.begin_s, window.end_s) == (32.0, 150.0)


def test_latencies_that_grow_until_the_end_are_no_steady_state() -> None:
    growing = answers([1.0] * 20 + [1.0 + index for index in range(30)])
    assert SteadyState(("e2e_s.p90",), 64).window(growing, 1000.0) is None


def first_end(state: SteadyState, sent: list[Answer]) -> int:
    """Return the number of answers at which a load ends."""
    found = (count for count in range(1, len(sent) + 1) if state.reached(sent[:count], float(count)))
    return next(found, len(sent))


@pytest.mark.parametrize(
    ("asked", "concurrency", "fewest"),
    [("ttft_s.mean", None, MIN_COUNTED), ("ttft_s.p99", None, 400), ("output_tokens_per_s", 100, 100 * (BATCHES + 1))],
)
def test_a_load_ends_with_enough_requests_for_its_figures(asked: str, concurrency: int | None, fewest: int) -> None:
    assert fewest <= first_end(SteadyState((asked,), concurrency), answers([1.0] * 2000)) <= 1.25 * fewest


def test_intervals_contain_the_mean() -> None:
    rng, inside, state = np.random.default_rng(2), 0, SteadyState(("e2e_s.mean",), None)
    for _ in range(200):
        sent = answers(rng.gamma(4.0, 0.25, size=400).tolist())
        window = given(state.window(sent, 1000.0))
        mean = np.mean([each.e2e_s for each in window.counted(sent)])
        inside += bool(abs(mean - 1.0) <= window.error * mean)
    assert inside / 200 > 0.88


def test_a_decode_time_that_varies_is_the_noise_of_a_load() -> None:
    assert decode_error(answers([1.0] * 32)) == pytest.approx(0.0)
    assert 0.05 < decode_error(answers([1.0] * 16 + [1.1] * 16)) < 0.1
    assert decode_error(answers([1.0] * 9)) == 0.0


def test_a_load_that_takes_too_long_ends_with_any_steady_state() -> None:
    state, sent = SteadyState(("ttft_s.p99",), None, max_s=50.0), answers([1.0] * 100)
    assert state.reached(sent[:40], 40.0) is None
    assert isinstance(state.reached(sent[:60], 60.0), Window)


def measured(delays_s: list[float], **changes: object) -> LoadResult:
    """Return the result of a load on a server that answers after the delays in turn."""
    delays = itertools.chain(delays_s, itertools.repeat(delays_s[-1]))

    async def delayed(body: Body, wire: Wire) -> None:
        await asyncio.sleep(next(delays))
        await wire.head()
        await pieces(body["max_tokens"], wire)
        await finish(body, wire)

    with serving(delayed) as served:
        load = Load(input_len=8, output_len=2, num_prompts=None, is_steady=True, **changes)  # type: ignore[arg-type]
        return send(served.url, load=load, asked=("ttft_s.p50",))


@pytest.mark.slow
def test_only_the_steady_state_of_a_real_load_counts() -> None:
    result = measured([1.0] * 8 + [0.05], concurrency=8)
    assert result.problems == ()
    assert result.completed >= MIN_COUNTED
    assert result.figures["ttft_s.p99"] < 0.9
    assert result.figures["output_tokens_per_s"] == pytest.approx(2 * result.figures["requests_per_s"])
    assert given(result.window)[1] <= result.duration_s


@pytest.mark.parametrize("count", [1, 2, 7, 20, 101, 1000])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    values = np.random.default_rng(count).lognormal(sigma=2.0, size=count)
    expected = [values.mean(), *np.percentile(values, [50, 90, 95, 99])]
    assert list(statistics_of(values).values()) == expected
