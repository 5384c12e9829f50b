"""Steps of minutes: with fewer micro-batches, and scaled by the model."""

from __future__ import annotations

import math

import pytest

from flagcore.domain.spec import Control, Task
from flagcore.domain.trial import Measurement
from flagcore.engines.megatron.adapter import WORKLOAD
from flagcore.stages.predict import predict_columns
from flagcore.stages.shorten import FIXED_FACTOR, UNMODELLED_SHARE, scale_steps, shorten
from tests import small

LONG = small.task(global_batch_size=512, control=Control(max_step_time=60.0))


def linear(task: Task) -> float:
    """A step with 20 s that it takes once, and one second a sample."""
    return 20.0 + task.spec.train.global_batch_size


def test_a_long_step_runs_fewer_micro_batches_and_is_scaled_by_the_model() -> None:
    short = shorten(LONG, WORKLOAD, small.candidate(data_parallel_size=4, micro_batch_size=2), 532.0, linear)
    assert short is not None
    assert (short.global_batch_size, short.whole) == (64, 512)  # 8 of 64 micro-batches: 60 s of 532 s are 7.2
    assert short.scale == pytest.approx(532.0 / 84.0)


def test_the_interval_covers_half_and_twice_the_fixed_part() -> None:
    short = scale_steps(64, 512, 84.0, 532.0)
    assert short.low == pytest.approx((20 * FIXED_FACTOR + 512) / (20 * FIXED_FACTOR + 64))
    assert short.high == pytest.approx((20 / FIXED_FACTOR + 512) / (20 / FIXED_FACTOR + 64))
    assert short.low < short.scale < short.high < 8.0
    single = scale_steps(64, 512, 64.0, 512.0)
    one = 64.0 * UNMODELLED_SHARE  # of a step without a fixed part
    assert single.low == pytest.approx((one + 512) / (one + 64))
    assert single.scale == single.high == 8.0


@pytest.mark.parametrize(
    ("most", "step"), [(None, 1e4), (60.0, 59.0), (60.0, None)], ids=["off", "short enough", "unknown"]
)
def test_other_steps_run_whole(most: float | None, step: float | None) -> None:
    task = small.task(global_batch_size=512, control=Control(max_step_time=most))
    assert shorten(task, WORKLOAD, small.candidate(), step, linear) is None


def test_steps_run_whole_if_the_model_predicts_no_time_or_no_gain() -> None:
    assert shorten(LONG, WORKLOAD, small.candidate(), 600.0, lambda task: math.nan) is None
    assert shorten(LONG, WORKLOAD, small.candidate(), 600.0, lambda task: 600.0) is None


@pytest.mark.parametrize(
    ("data", "pipeline", "micro", "share", "batch"),
    [
        (1, 1, 1, 0.001, 4),  # the fewest micro-batches
        (8, 1, 2, 0.1, 64),
        (4, 8, 1, 0.001, 64),  # two a stage
        (4, 8, 1, 0.15, 96),  # 19.2 of 128 micro-batches, a multiple of 8
        (16, 16, 1, 0.001, None),  # 32 micro-batches are what fills 16 stages
        (16, 8, 1, 0.9, None),
    ],
)
def test_the_pipeline_is_filled_and_the_batch_is_legal(
    data: int, pipeline: int, micro: int, share: float, batch: int | None
) -> None:
    candidate = small.candidate(data_parallel_size=data, pipeline_model_parallel_size=pipeline, micro_batch_size=micro)
    assert WORKLOAD.shorter_batch(LONG, candidate, share) == batch


def test_the_model_scales_only_parts_that_grow_with_the_batch() -> None:
    task = small.task(global_batch_size=512, devices=4)
    columns = WORKLOAD.columns(task, {"data_parallel_size": 2, "pipeline_model_parallel_size": 2})

    def predicted(some: Task) -> float:
        return float(predict_columns(some, WORKLOAD, columns, small.costs(some)).step_time_s[0])

    short = scale_steps(16, 512, predicted(task.with_batch(16)), predicted(task))
    assert 8.0 < short.low <= short.scale <= short.high < 32.0


def test_a_measurement_of_shortened_steps_is_scaled_to_whole_steps() -> None:
    measured = Measurement(
        step_times_s=(2.0, 4.0), step_time_s=3.0, spread_s=1.0, tokens_per_second_per_device=100.0, device_used_bytes=7
    )
    full = scale_steps(64, 512, 84.0, 532.0).scaled(measured)
    scale = 532.0 / 84.0
    assert full.step_times_s == pytest.approx((2.0 * scale, 4.0 * scale))
    assert (full.step_time_s, full.spread_s) == pytest.approx((3.0 * scale, scale))
    assert full.tokens_per_second_per_device == pytest.approx(100.0 * 8.0 / scale)
    assert (full.scaled_from, full.device_used_bytes) == (3.0, 7)
    assert full.low_s is not None
    assert full.high_s is not None
    assert full.modelled_s is not None
    assert full.low_s < full.step_time_s < full.high_s
    assert full.modelled_s == pytest.approx(3.0 * scale - 3.0)
