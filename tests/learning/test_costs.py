"""What a trial is expected to cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.space import FloatArray
from flagcore.domain.trial import Trial, TrialState
from flagcore.learning.trials import expected_seconds, full_trial_seconds
from tests.strategies.contexts import predictions, search_context, trial_of

KNOWN = predictions()
STEPS = search_context(KNOWN).task.spec.control.train_iters
STEP = float(KNOWN.step_time_s[0])
WHOLE = 20.0 + STEPS * STEP


def cost(fits: float, ends: float, *trials: Trial) -> float:
    """The cost of a step as long as that of row 0, whose trial took 20 s beside its steps."""
    seen = search_context(KNOWN, [replace(trial_of(0, STEP, 0), duration_s=WHOLE), *trials])
    log_time: FloatArray = np.log([STEP])
    seconds_ = full_trial_seconds(seen, log_time)
    assert seconds_.tolist() == pytest.approx([WHOLE])
    return float(expected_seconds(seen, log_time, seconds_, np.array([fits]), np.array([ends]))[0])


def lost(row: int, state: TrialState, seconds: float) -> Trial:
    return replace(trial_of(row, None, row), state=state, duration_s=seconds)


def test_a_trial_that_succeeds_costs_its_steps_and_its_start() -> None:
    assert cost(1.0, 1.0) == pytest.approx(WHOLE)


def test_the_first_out_of_memory_is_assumed_to_cost_the_start_and_a_step() -> None:
    assert cost(0.0, 1.0) == pytest.approx(20.0 + STEP)


def test_running_out_of_memory_costs_as_much_time_as_before() -> None:
    out = [lost(row, TrialState.OUT_OF_MEMORY, seconds) for row, seconds in ((1, 300.0), (2, 500.0), (3, 400.0))]
    assert cost(0.25, 1.0, *out) == pytest.approx(0.25 * WHOLE + 0.75 * 400.0)


def test_a_failure_costs_as_much_time_as_earlier_failures() -> None:
    broken = lost(1, TrialState.TIMED_OUT, 1800.0)
    assert cost(1.0, 0.5, broken) == pytest.approx(0.5 * WHOLE + 0.5 * 1800.0)
