"""Figures out of answers that are made by hand."""

from collections.abc import Sequence

import pytest

from flagcore.engines.serving.load.figures import (
    Window,
    duration_s,
    figures_of,
    goodput,
    steady_figures,
)
from flagcore.engines.serving.load.result import Answer, LoadResult
from flagcore.engines.serving.load.sending import Meter
from tests.engines.serving.load.servers import answer


def result(*answers: Answer) -> LoadResult:
    return LoadResult(
        figures=figures_of(answers),
        duration_s=duration_s(answers),
        completed=len(answers),
        failed=0,
        requests=answers,
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
    monkeypatch.setattr("flagcore.engines.serving.load.sending._busy_s", lambda: next(busy))
    monkeypatch.setattr("flagcore.engines.serving.load.sending._process_tree_s", lambda: next(tree))
    monkeypatch.setattr("flagcore.engines.serving.load.sending.time.perf_counter", lambda: next(clock))
    assert Meter().figures()["others_cores"] == pytest.approx(0.5)
