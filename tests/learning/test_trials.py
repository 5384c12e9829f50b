"""What trials say of predictions: measurements, and bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.trial import PROBE, Trial, TrialState
from flagcore.learning.trials import observed_times, overhead_seconds
from tests.strategies.contexts import predictions, search_context, trial_of

KNOWN = predictions()
STEPS = search_context(KNOWN).task.spec.control.train_iters


def timed_out(row: int, times: float, beside: float, **changes: object) -> Trial:
    """A trial that timed out when its steps could have taken `times` what is predicted."""
    seconds = beside + STEPS * times * float(KNOWN.step_time_s[row])
    return replace(trial_of(row, None, 5), state=TrialState.TIMED_OUT, duration_s=seconds, **changes)  # type: ignore[arg-type]


def measured() -> list[Trial]:
    """Trials as predicted, which took 20 s beside their steps."""
    steps = [float(KNOWN.step_time_s[row]) for row in range(3)]
    return [replace(trial_of(row, step, row), duration_s=20.0 + STEPS * step) for row, step in enumerate(steps)]


def reported(*trials: Trial) -> list[float]:
    return observed_times(search_context(KNOWN, [*measured(), *trials])).log_ratio[3:].tolist()


def test_trials_have_a_start_time_in_addition_to_steps() -> None:
    assert overhead_seconds(search_context(KNOWN, measured())) == pytest.approx(20.0)
    assert overhead_seconds(search_context(KNOWN)) == 0.0


def test_steps_that_a_short_warm_up_saved_are_not_part_of_the_start() -> None:
    control = search_context(KNOWN).task.spec.control
    (trial, *_others) = measured()
    assert trial.measurement is not None
    early = replace(trial, measurement=replace(trial.measurement, warmup_steps=control.warmup_iters - 1))
    early = replace(early, duration_s=trial.duration_s - trial.measurement.step_time_s)
    assert overhead_seconds(search_context(KNOWN, [early])) == pytest.approx(20.0)


def test_a_time_out_is_a_bound_of_the_step() -> None:
    assert reported(timed_out(7, 1.4, 20.0)) == [pytest.approx(np.log(1.4))]


def test_an_expected_timeout_teaches_nothing() -> None:
    assert reported(timed_out(7, 0.5, 20.0)) == [pytest.approx(0.0, abs=0.05)]


def test_a_hung_trial_does_not_bound_the_time() -> None:
    assert reported(timed_out(7, 20.0, 20.0)) == []


def test_a_timed_out_probe_does_not_bound_the_step() -> None:
    probe = timed_out(7, 1.4, 20.0, fidelity=PROBE)
    assert observed_times(replace(search_context(KNOWN, measured()), probes=[probe])).log_ratio.size == 3
