"""The steady state of simulated and real loads."""

import asyncio
import itertools

import numpy as np
import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.figures import BATCHES, MIN_COUNTED, SteadyState, Window
from flagcore.engines.serving.load.result import Answer, LoadResult
from tests.engines.serving.load.servers import Body, Wire, answer, finish, pieces, send, serving


def answers(e2e_s: list[float], every_s: float = 1.0) -> list[Answer]:
    """Return the answers to requests that are sent one after the other."""
    return [answer(index * every_s, seconds / 2, (seconds / 2,)) for index, seconds in enumerate(e2e_s)]


def test_the_slow_start_of_an_open_loop_does_not_count() -> None:
    sent = answers([10.0 * 0.8**index + 1.0 for index in range(40)] + [1.0, 1.1] * 80)
    window = SteadyState(("e2e_s.mean",), None).window(sent, 1000.0)
    assert window is not None
    assert 10 <= window.begin_s <= 60
    counted = window.counted(sent)
    assert np.mean([each.e2e_s for each in counted]) == pytest.approx(1.05, rel=0.02)


def test_the_first_wave_of_a_closed_loop_does_not_count() -> None:
    window = SteadyState(("ttft_s.p50",), 32).window(answers([1.0] * 200), 150.0)
    assert window is not None
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
    ended = first_end(SteadyState((asked,), concurrency), answers([1.0] * 2000))
    assert fewest <= ended <= 1.25 * fewest


def test_intervals_contain_the_mean() -> None:
    rng, inside, state = np.random.default_rng(2), 0, SteadyState(("e2e_s.mean",), None)
    for _ in range(200):
        sent = answers(rng.gamma(4.0, 0.25, size=400).tolist())
        window = state.window(sent, 1000.0)
        assert window is not None
        mean = np.mean([each.e2e_s for each in window.counted(sent)])
        inside += bool(abs(mean - 1.0) <= window.error * mean)
    assert inside / 200 > 0.88


def test_a_load_that_takes_too_long_ends_with_any_steady_state() -> None:
    state, sent = SteadyState(("ttft_s.p99",), None, max_s=50.0), answers([1.0] * 100)
    assert state.reached(sent[:40], 40.0) is None
    assert isinstance(state.reached(sent[:60], 60.0), Window)


def measured(delays_s: list[float], **changes: object) -> LoadResult:
    """Return the result of a load on a server that answers after the delays in turn."""
    delays = itertools.chain(delays_s, itertools.repeat(delays_s[-1]))

    async def delayed(body: Body, wire: Wire) -> None:
        delay = next(delays)
        await asyncio.sleep(delay)
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
    assert result.window is not None
    assert result.completed >= MIN_COUNTED
    assert result.figures["ttft_s.p99"] < 0.9
    assert result.figures["output_tokens_per_s"] == pytest.approx(2 * result.figures["requests_per_s"])
    assert result.window[1] <= result.duration_s


@pytest.mark.slow
def test_a_real_load_without_steady_state_has_figures_of_all_requests_and_a_note() -> None:
    slower = [0.002 * index for index in range(2000)]
    result = measured(slower, concurrency=None, request_rate=400.0)
    assert result.window is None
    assert result.figures["requests_per_s"] > 0
    assert result.notes
