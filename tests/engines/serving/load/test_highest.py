"""The search for the highest load that meets latency limits."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flagcore.engines.serving.load.figures import statistics_of
from flagcore.engines.serving.load.progress import RESOLUTION, LimitCheck, completions_per_s, highest_load
from flagcore.engines.serving.load.result import Answer


def answer(seconds: float, *, tpot_s: float | None = 0.01) -> Answer:
    return Answer(
        start_s=0.0, ttft_s=seconds, tpot_s=tpot_s, e2e_s=seconds + 1, gaps_s=(), input_tokens=8, output_tokens=8
    )


def limited_by(highest: float) -> tuple[list[float], Callable[[float], bool]]:
    """Return whether a load is within the limits, and the loads that were asked for."""
    tried: list[float] = []
    return tried, lambda load: tried.append(load) or load <= highest  # type: ignore[func-returns-value]


@pytest.mark.parametrize("start", [0.01, 3.0, 40.0, 57.0, 60.0, 9000.0])
@pytest.mark.parametrize("true", [0.02, 57.3, 999.0])
def test_it_is_found_within_its_resolution(start: float, true: float) -> None:
    tried, meets_limit = limited_by(true)
    found = highest_load(meets_limit, start, minimum=0.001, maximum=10_000)
    assert found is not None
    assert true / RESOLUTION <= found <= true
    assert len(set(tried)) == len(tried) <= 20
    if 0.5 < start / true < 2:
        assert len(tried) <= 7


@pytest.mark.parametrize("true", [1, 2, 3, 7, 64, 127, 128])
def test_clients_are_whole_numbers(true: int) -> None:
    tried, meets_limit = limited_by(true)
    found = highest_load(meets_limit, 5.0, minimum=1, maximum=128, is_integer=True)
    assert found is not None
    assert true / RESOLUTION - 1 < found <= true
    assert len(set(tried)) == len(tried)
    assert all(load == round(load) for load in tried)


@pytest.mark.parametrize(("meets_limit", "found"), [(True, 64.0), (False, None)])
def test_the_range_is_not_left(meets_limit: bool, found: float | None) -> None:
    tried: list[float] = []
    assert (
        highest_load(lambda load: tried.append(load) or meets_limit, 8.0, minimum=1, maximum=64, is_integer=True)
        == found
    )
    assert (min(tried), max(tried)) == ((8.0, 64.0) if meets_limit else (1.0, 8.0))


@pytest.mark.parametrize("figure", ["ttft_s.mean", "ttft_s.p50", "ttft_s.p90", "ttft_s.p99"])
@pytest.mark.parametrize("count", [1, 2, 10, 101, 150])
def test_a_load_is_stopped_only_if_its_limit_is_certain_to_be_exceeded(figure: str, count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        seconds = rng.gamma(1.0, 1.0, size=count)
        limit = float(rng.uniform(0.1, 3.0))
        check = LimitCheck({figure: limit, "itl_s.p99": 1e-9}, count)
        stopped = next((place for place, each in enumerate(seconds) if check.exceeded(answer(each))), math.inf)
        statistic = statistics_of(seconds)[figure.partition(".")[2]]
        if stopped < count:
            assert statistic > limit


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    check = LimitCheck({"tpot_s.mean": 0.001}, 2)
    assert not check.exceeded(answer(1.0, tpot_s=None))
    assert check.exceeded(answer(1.0, tpot_s=0.1))


@pytest.mark.parametrize(
    ("start", "option", "second"),
    [
        (10.0, lambda tried: {"headroom": lambda: (50.0 / tried[-1]) ** 2}, 30.0),  # a load far below its limits
        (900.0, lambda tried: {"capacity": lambda: 55.0}, 55.0),  # the rate of an overloaded server
    ],
)
def test_the_next_load_follows_from_the_figures_of_the_last_one(start: float, option: Any, second: float) -> None:
    tried, meets_limit = limited_by(50.0)
    found = highest_load(meets_limit, start, minimum=1, maximum=1000, **option(tried))
    assert found is not None
    assert 50.0 / RESOLUTION <= found <= 50.0
    assert tried[1] == second
    assert len(tried) <= (8 if start < 50.0 else 6)


def test_the_rate_of_completions_is_that_between_the_first_and_the_last_end() -> None:
    answers = [dataclasses.replace(answer(1.0), start_s=start) for start in (0.0, 4.0, 2.0)]
    assert completions_per_s(answers) == pytest.approx(0.5)
    assert completions_per_s(answers[:1]) == completions_per_s([]) == math.inf
