"""How steps grow with the number of nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagcore.domain.candidate import Candidate
from flagcore.domain.growth import PRIOR, calibrated, scale_of
from flagcore.domain.trial import Measurement, Role, Shortened, Trial, TrialState

OF = 64


def run(nodes: int, step: float, scale: float, knob: int = 1) -> Trial:
    """A run on some of 64 nodes that took `step`, whose step on all is predicted to be `scale` times as long."""
    predicted = scale_of(PRIOR, scale, nodes, OF)
    short = Shortened(
        global_batch_size=nodes,
        whole=OF,
        scale=scale,
        low=predicted.low,
        high=predicted.high,
        nodes=nodes,
        of_nodes=OF,
        own=predicted.own,
    )
    measured = Measurement(
        step_times_s=(step,), step_time_s=step, spread_s=0.0, tokens_per_second_per_device=100.0 / step
    )
    return Trial(
        number=nodes,
        candidate=Candidate.of({"micro_batch_size": knob}),
        role=Role.SEARCH,
        state=TrialState.MEASURED,
        shortened=short,
        measurement=short.scaled(measured),
    )


def step_of(trial: Trial) -> tuple[float, float, float]:
    assert trial.measurement is not None
    found = (trial.measurement.low_s, trial.measurement.step_time_s, trial.measurement.high_s)
    assert all(found)
    return found  # type: ignore[return-value]


def test_without_runs_on_several_numbers_of_nodes_steps_are_scaled_as_predicted() -> None:
    trials = (run(8, 1.0, 1.3), run(8, 2.0, 1.1, knob=2))
    assert calibrated(trials) == trials
    low, step, high = step_of(trials[0])
    assert step == pytest.approx(1.3)
    assert low < step < high


def test_growth_as_predicted_narrows_the_interval_and_keeps_the_value() -> None:
    one_run, before = run(8, 1.0, 1.3), step_of(run(8, 1.0, 1.3))
    after = step_of(calibrated((one_run, run(16, 1.1, 1.3 / 1.1)))[0])
    assert after[1] == pytest.approx(before[1], rel=0.01)
    assert after[2] - after[0] < 0.8 * (before[2] - before[0])


def test_twice_the_predicted_growth_lengthens_the_steps_of_all_candidates() -> None:
    trials = (run(8, 1.0, 1.3), run(16, 1.2, 1.3 / 1.1), run(8, 1.0, 1.3, knob=2))
    first, second, other = (step_of(trial)[1] for trial in calibrated(trials))
    assert first == other > 1.4
    assert second == pytest.approx(first, rel=0.05)


def test_rates_follow_the_steps_and_a_second_calibration_changes_nothing() -> None:
    trials = (run(8, 1.0, 1.3), run(16, 1.2, 1.3 / 1.1))
    calibrated_once = calibrated(trials)
    measured = calibrated_once[0].measurement
    assert measured is not None
    assert measured.tokens_per_second_per_device == pytest.approx(100.0 / measured.step_time_s)
    assert [step_of(trial) for trial in calibrated(calibrated_once)] == [
        pytest.approx(step_of(trial)) for trial in calibrated_once
    ]


def test_a_run_on_all_nodes_counts_too() -> None:
    whole_run = replace(run(OF, 1.5, 1.0), shortened=None)
    low, step, high = step_of(calibrated((run(8, 1.0, 1.3), whole_run))[0])
    assert 1.35 < step < 1.55
    assert high - low < 0.3
