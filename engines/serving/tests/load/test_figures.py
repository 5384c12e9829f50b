"""Metrics of answers that are made by hand, and the steady state of simulated and real loads."""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.figures import (
    BATCHES,
    MIN_COUNTED,
    SteadyState,
    Window,
    decode_error,
    duration_s,
    figures_of,
    goodput,
    steady_figures,
)
from flagcore_serving.load.result import Answer, LoadResult
from flagcore_serving.load.sending import Meter

from engines.serving.tests.load.servers import Body, Wire, answer, finish, pieces, send, serving
from tests.checks import given


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
