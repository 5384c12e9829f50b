"""The chance to fail, as failed and ended trials tell it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.trial import Trial, TrialState
from flagcore.learning.probabilities import success_probability
from tests.strategies.contexts import SPACE, predictions, search_context, trial_of

KNOWN = predictions()
ROWS = np.arange(len(SPACE))
COLUMNS = SPACE.columns()


def lost(row: int, number: int, state: TrialState = TrialState.FAILED) -> Trial:
    return replace(trial_of(row, None, number), state=state)


def chances(*trials: Trial) -> np.ndarray:
    return success_probability(search_context(KNOWN, trials), ROWS)


def distances(row: int) -> np.ndarray:
    """In how many knobs each row differs from one."""
    different: np.ndarray = sum((column != column[row]).astype(int) for column in COLUMNS.values())
    return different


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT])
def test_candidates_similar_to_a_failed_one_are_less_likely_to_succeed(state: TrialState) -> None:
    ends, far = chances(lost(0, 0, state)), distances(0)
    assert ends[far == far.min()].max() < ends[far == far.max()].min()
    assert ends[far == np.sort(np.unique(far))[1]].max() < 0.7
    assert ends.min() > 0.0


@pytest.mark.parametrize("state", [TrialState.OUT_OF_MEMORY, TrialState.INTERRUPTED])
def test_out_of_memory_and_interrupts_are_not_failures(state: TrialState) -> None:
    assert chances(lost(0, 0, state)).tolist() == [1.0] * len(SPACE)


def test_a_failure_is_attributed_to_the_value_without_successful_trials() -> None:
    sizes = COLUMNS["micro_batch_size"]
    broken = np.flatnonzero(sizes == 2)[:2]
    fine = [row for each in broken for row in np.flatnonzero((distances(each) <= 2) & (sizes != 2))[:3]]
    ended = [trial_of(int(row), 1.0, at) for at, row in enumerate(fine)]
    ends = chances(*ended, *(lost(int(row), 10 + at) for at, row in enumerate(broken)))
    assert ends[sizes == 2].max() < 0.25
    assert np.median(ends[sizes != 2]) > 0.8


def test_a_value_that_failed_once_among_many_successes_is_hardly_suspected() -> None:
    sizes = COLUMNS["micro_batch_size"]
    rows = np.flatnonzero(sizes == 2)
    ended = [trial_of(int(row), 1.0, at) for at, row in enumerate(rows[1:9])]
    assert np.median(chances(*ended, lost(int(rows[0]), 10))[rows]) > 0.5
