"""Readings that cannot be make their trial failed, and the reason names the value and the rule."""

import math
from dataclasses import replace
from typing import Any

import pytest

from flagcore.domain.trial import PROBE, Shortened, Trial, TrialState, checked
from tests import tasks

DONE = tasks.trial(
    1, tasks.candidate(), 0.5, duration_s=4.0, predicted=tasks.prediction(capacity=float(1 << 30), compute_s=1.0)
)


def with_figures(trial: Trial = DONE, **changes: Any) -> Trial:
    assert trial.measurement is not None
    steps = changes.get("step_times_s")
    changes = {"step_time_s": steps[0]} | changes if steps else changes
    return replace(trial, measurement=replace(trial.measurement, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_times_s": (0.0,)}, "step time: 0 s is not between 1e-09 and 1e+06 s"),
        ({"step_times_s": (1.0, -2.0)}, "step time: -2 s"),
        ({"step_times_s": (math.nan,)}, "step time: nan s"),
        ({"step_times_s": (math.inf,)}, "step time: inf s"),
        ({"step_times_s": (1e-300,)}, "step time: 1e-300 s"),
        ({"step_times_s": (1e305,) * 3}, "step time: 1e+305 s"),
        ({"step_time_s": 5e-324}, "step time: 4.941e-324 s"),
        ({"scaled_from": 0.0, "low_s": 0.0}, None),
        ({"scaled_from": math.inf}, "step time: inf s"),
        ({"step_times_s": (2.0, 2.0, 2.0)}, "step time: 3 steps take 6 s, but the trial took 4 s; check the unit"),
        ({"step_times_s": (2.0, 2.0)}, None),
        ({"step_times_s": (8.0, 8.0), "scaled_from": 2.0}, None),
        ({"step_times_s": (8.0, 8.0), "scaled_from": 4.0}, "step time: 2 steps take 8 s"),
        ({"step_times_s": (900.0,), "points": ({"concurrency": 1.0},)}, None),
        ({"tokens_per_second_per_device": 0.0}, "throughput: 0 tokens/s"),
        ({"tokens_per_second_per_device": math.inf}, "throughput: inf tokens/s"),
        ({"peak_allocated_bytes": 9 << 30}, None),
        ({"peak_allocated_bytes": 11 << 30}, "memory: peak_allocated_bytes: 11 GiB is not between 0 and 10 GiB"),
        ({"peak_reserved_bytes": -1}, "memory: peak_reserved_bytes"),
        ({"device_used_bytes": 10**300}, "memory: device_used_bytes"),
        ({"spread_s": math.nan}, "figure: spread_s is nan"),
        ({"figures": {"ttft_s.p99": math.inf}}, "figure: ttft_s.p99 is inf"),
        ({"telemetry": {"power_watts": math.nan}}, "figure: power_watts is nan"),
        ({"losses": (None, 1.0)}, None),
    ],
)
def test_a_reading_that_cannot_be_fails_its_trial(changes: dict[str, Any], words: str | None) -> None:
    trial = with_figures(**changes)
    found = checked(trial)
    if words is None:
        assert found == trial
    else:
        assert (found.state, found.measurement) == (TrialState.FAILED, None)
        assert f"unusable {words}" in (found.reason or "")


def test_only_a_run_of_flagcore_is_compared_with_its_duration() -> None:
    long = with_figures(step_times_s=(60.0,))
    assert checked(long).state is TrialState.FAILED
    for changes in ({"source": "history.csv"}, {"fidelity": PROBE}, {"duration_s": 0.0}):
        assert checked(replace(long, **changes)).state is TrialState.MEASURED


def test_a_failed_trial_keeps_its_reason_and_the_steps_that_can_be() -> None:
    shortened = Shortened(global_batch_size=2, whole=8, scale=2.0, low=1.0, high=3.0)
    steps = {"finished_steps_s": (math.inf, 1.0, 0.0, -1.0, 1e305, 8.0, 20.0), "shortened": shortened}
    failed = with_figures(replace(DONE, state=TrialState.INVALID, reason="why", **steps), step_times_s=(0.0,))
    found = checked(failed)
    assert (found.state, found.reason, found.measurement) == (TrialState.INVALID, "why", None)
    assert found.finished_steps_s == (1.0, 8.0)
