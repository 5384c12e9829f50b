"""Where the time of a candidate goes, against another one."""

from __future__ import annotations

import pytest

from flagcore.report.causes import causes_text, largest_differences

STEP = "tokens_per_second_per_device"
TIME = {"compute_s": (1.0, 0.7), "tp_comm_s": (0.5, 0.1), "pp_bubble_s": (0.0, 0.2)}


def text(seconds: tuple[float, float], predicted: tuple[float | None, float | None], objective: str = STEP) -> str:
    return causes_text(objective, "the baseline", seconds, predicted, TIME, "measured")


def test_only_parts_with_the_sign_of_the_total_are_causes_the_largest_first() -> None:
    assert largest_differences(TIME) == {"tp_comm_s": pytest.approx(-0.4), "compute_s": pytest.approx(-0.3)}
    assert largest_differences({"compute_s": (1.0, 1.0)}) == {}


def test_the_parts_are_listed_only_if_the_prediction_has_the_sign_of_the_measurement() -> None:
    faster = text((1.6, 1.2), (1.5, 1.0))
    assert "-25.0%" in faster
    assert "-0.4 s" in faster
    assert faster.index("-0.4 s") < faster.index("-0.3 s")
    assert "-0.4 s" not in text((1.2, 1.6), (1.5, 1.0))
    assert "-0.4 s" not in text((1.6, 1.2), (None, 1.0))


@pytest.mark.parametrize("objective", [STEP, "output_tokens_per_s"])
def test_the_speedup_of_rounds_is_the_only_one(objective: str) -> None:
    told = causes_text(objective, "the baseline", (1.6, 1.2), (1.5, 1.0), TIME, "measured", has_rounds=True)
    assert "%" not in told
    assert "-0.4 s" in told


def test_a_rate_is_compared_as_a_rate() -> None:
    assert "+100.0%" in text((0.5, 0.25), (0.5, 0.25), "output_tokens_per_s")
    assert "-50.0%" in text((0.5, 0.25), (0.5, 0.25), "ttft_s.p99")
