"""Loads that do not end in their time: estimates, and figures of the requests so far."""

import asyncio
import heapq
import sys
from typing import Any

import numpy as np
import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.figures import CUT_ERROR, cut, figures_of, steady_figures
from flagcore.engines.serving.load.result import Answer, LoadResult
from tests.engines.serving.load.servers import Behaviour, Body, Wire, answer, finish, pieces, send, serving, well

TOKENS, FLIGHT, REQUESTS = 64, 16, 512


def closed_loop(spread: float, count: int = REQUESTS) -> list[Answer]:
    """Return the answers of a server whose answers take 1 s on average, FLIGHT at once."""
    rng, slots, answers = np.random.default_rng(3), [0.0] * FLIGHT, []
    for _ in range(count):
        start, e2e = heapq.heappop(slots), float(rng.uniform(1.0 - spread, 1.0 + spread))
        gaps = (0.9 * e2e / (TOKENS - 1),) * (TOKENS - 1)
        answers.append(answer(start, 0.1 * e2e, gaps))
        heapq.heappush(slots, start + e2e)
    return answers


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seconds", [1.5, 2.5, 5.1, 12.0])
def test_the_figures_of_a_load_that_was_cut_are_those_of_the_whole(spread: float, seconds: float) -> None:
    whole = closed_loop(spread)
    sent = [each for each in whole if each.start_s < seconds]
    answered = [each for each in sent if each.end_s <= seconds]
    window = cut(answered, min((each.start_s for each in sent if each.end_s > seconds), default=seconds), FLIGHT)
    assert window is not None
    assert window.error >= CUT_ERROR
    expected, found = figures_of(whole), steady_figures(answered, window)
    for name in ("output_tokens_per_s", "requests_per_s", "ttft_s.mean", "e2e_s.p50"):
        assert found[name] == pytest.approx(expected[name], rel=0.15 if spread == 0.3 and seconds < 3 else 0.06)


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
    assert result.progress is not None
    assert result.progress.requests == 5000


def test_a_load_whose_first_requests_take_too_long_ends_at_once() -> None:
    result = sent(answers_in_10_ms, 20.0, sys.maxsize, num_prompts=10_000, concurrency=1)
    assert result.problems[0].startswith("timed out")
    assert result.duration_s < 15.0
    assert result.progress is not None
    assert result.progress.answered >= 1
    assert result.progress.all_s is not None
    assert result.progress.all_s > 30.0
    assert not result.figures


def test_requests_that_arrive_too_late_are_not_waited_for() -> None:
    result = sent(well, 20.0, 8, num_prompts=100, concurrency=None, request_rate=0.1)
    assert result.failed == 100
    assert result.duration_s < 15.0
    assert result.progress is not None
    assert result.progress.all_s == pytest.approx(990.0)
