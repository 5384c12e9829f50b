"""One candidate explained, and compared with another."""

from dataclasses import replace
from typing import Any

import pytest

from flagcore.domain.prediction import Labels
from flagcore.domain.records import GIB, read_prediction
from flagcore.report.candidate_report import causes_text, differences_text
from flagcore.report.explanation import memory_parts, needs_text, prediction_text
from tests import tasks

SERVED: dict[str, Any] = {
    "output_tokens_per_s": 1500.0,
    "ttft_s": {"mean": 0.1, "p50": 0.09, "p90": 0.2, "p99": 0.3},
    "objective": {"value": 1500.0, "low": 1000.0, "high": 1800.0},
    "time": {"queue_s": 0.5, "prefill_s": 0.25, "decode_s": 0.25, "collectives_s": 0.0, "host_s": 0.0},
    "memory": {
        "fits": True,
        "capacity_gib": 80.0,
        "static_gib": 60.0,
        "activation_gib": 2.0,
        "device_used_gib": 70.0,
        "kv_cache_gib": 40.0,
        "kv_cache_tokens": 320000.0,
    },
}


def test_a_server_is_described_with_units() -> None:
    text = prediction_text(SERVED, Labels())
    assert "~1,500 output tokens/s" in text
    assert "Mean time of a request: ~1 s" in text
    assert ["queue", "0.5", "50.0%", "waiting"] in [line.split()[:4] for line in text.splitlines()]
    assert "weights ~20.00, activations and graphs ~2.00, KV cache (320,000 tokens" in text
    assert "~70.00 / 80.00 GiB (fits)" in text
    assert "{" not in text
    assert "_s" not in text


def test_parts_of_memory_add_up_for_training_and_for_servers() -> None:
    training = {
        "static_gib": 6.0,
        "activation_gib": 2.0,
        "peak_allocated_gib": 8.5,
        "reserved_gib": 9.0,
        "device_used_gib": 10.0,
        "capacity_gib": 8.0,
        "worst_stage": 3,
        "components": {"ffn": {"params": 1.0, "weights_gib": 2.0, "optimizer_gib": 3.5, "activation_gib": 2.0}},
    }
    found = read_prediction({"memory": training})
    parts = memory_parts(found)
    assert sum(parts.values()) == 10.0 * GIB
    assert parts["other states"] == 0.5 * GIB
    text = needs_text(found)
    assert all(each in text for each in ("10.00 / 8.00 GiB", "stage 3: weights 2.00, "))
    server = replace(found, components={}, figures={"kv_cache_bytes": 4.0 * GIB})
    assert sum(memory_parts(server).values()) == 10.0 * GIB
    assert memory_parts(server)["weights"] == 2.0 * GIB
    assert "stage" not in needs_text(server)


STEP = "tokens_per_second_per_device"
TIME = {"compute_s": (1.0, 0.7), "tp_comm_s": (0.5, 0.1), "pp_bubble_s": (0.0, 0.2)}


def text(
    seconds: tuple[float, float], predicted: tuple[float | None, float], objective: str = STEP, **more: bool
) -> str:
    """Return the causes of a time, with TIME as the parts of the predictions."""
    times = [{part: pair[place] for part, pair in TIME.items()} for place in (0, 1)]
    before, after = (replace(tasks.prediction(**t), step_time_s=s) for t, s in zip(times, predicted, strict=True))
    return causes_text(objective, "the baseline", seconds, (before, after), "measured", **more)


def test_parts_with_the_sign_of_the_change_come_first_and_those_against_it_are_named_as_such() -> None:
    assert differences_text(TIME, -1.0) == "tp_comm_s -0.4 s, compute_s -0.3 s; the other way: pp_bubble_s +0.2 s"
    assert differences_text({**TIME, "pp_bubble_s": (0.0, 0.03)}, -1.0) == "tp_comm_s -0.4 s, compute_s -0.3 s"
    assert differences_text({"compute_s": (1.0, 1.0)}, -1.0) == differences_text({"compute_s": (1.0, 0.5)}, 1.0) == ""


def test_the_parts_are_listed_only_if_the_prediction_explains_half_of_the_measured_difference() -> None:
    assert "-0.4 s" not in text((2.1, 1.0), (1.5, 1.0))
    assert text((2.1, 1.0), (1.5, 1.0)).endswith("of the baseline (measured).")
    faster = text((1.6, 1.2), (1.5, 1.0))
    assert "-25.0%" in faster
    assert "-0.4 s" in faster
    assert faster.index("-0.4 s") < faster.index("-0.3 s")
    assert "-0.4 s" not in text((1.2, 1.6), (1.5, 1.0))
    assert "-0.4 s" not in text((1.6, 1.2), (None, 1.0))


@pytest.mark.parametrize("objective", [STEP, "output_tokens_per_s"])
def test_the_speedup_of_rounds_is_the_only_one(objective: str) -> None:
    causes = text((1.6, 1.2), (1.5, 1.0), objective, has_rounds=True)
    assert causes.count("%") == 1
    assert "125%" in causes  # of the measured difference is predicted
    assert "-0.4 s" in causes


def test_a_rate_is_compared_as_a_rate() -> None:
    assert "+100.0%" in text((0.5, 0.25), (0.5, 0.25), "output_tokens_per_s")
    assert "-50.0%" in text((0.5, 0.25), (0.5, 0.25), "ttft_s.p99")
