"""What limits a candidate."""

from __future__ import annotations

import pytest

from flagcore.domain.prediction import Prediction
from flagcore.stages.predict import LIMITS, limit


def prediction(used: float = 1.0, capacity: float | None = 100.0, **time_s: float) -> Prediction:
    total = sum(time_s.values())
    return Prediction(
        step_time_s=total,
        low_s=total,
        high_s=total,
        time_s=time_s,
        static_bytes=used,
        activation_bytes=0.0,
        peak_allocated_bytes=used,
        reserved_bytes=used,
        device_used_bytes=used,
        capacity_bytes=capacity,
        fits=True,
        worst_stage=0,
        model_flops=1.0,
    )


@pytest.mark.parametrize("part", LIMITS)
def test_the_largest_part_besides_compute_limits_if_it_counts(part: str) -> None:
    others = {name: 0.01 for name in LIMITS if name != part}
    assert limit(prediction(compute_s=5.0, **others, **{part: 1.0})) == LIMITS[part]
    assert limit(prediction(compute_s=5.0, **others, **{part: 0.1})) == "compute"


def test_memory_limits_where_no_part_does_and_the_device_is_nearly_full() -> None:
    assert limit(prediction(used=91.0, compute_s=5.0, optimizer_s=0.1)) == "memory"
    assert limit(prediction(used=91.0, compute_s=5.0, optimizer_s=1.0)) == "optimizer"
    assert limit(prediction(used=89.0, compute_s=5.0)) == "compute"
    assert limit(prediction(used=91.0, capacity=None, compute_s=5.0)) == "compute"
