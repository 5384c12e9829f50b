"""The search says that hardly any gain is left only where that is so, however rough the model's errors are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.experience import Observations, PastMeasurements
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import Trial
from flagcore.strategies.learned import MIN_GAIN, STRATEGY
from tests.strategies.contexts import distorted, predictions, search_context, trial_of

KNOWN = predictions()
NEAR = np.argsort(KNOWN.step_time_s)[:100]


def rows_of(seed: int) -> IntArray:
    """Some rows among the fastest, to be the whole space."""
    return np.sort(np.random.default_rng(seed).choice(NEAR, 40, replace=False))


def misleading(rows: IntArray, seed: int) -> PastMeasurements:
    """A past with smooth errors, in which other parts of a step are slow than in the task at hand."""
    real = distorted(KNOWN, 100 + seed, spread=0.02)
    ratio = np.log(real[rows] / KNOWN.step_time_s[rows])
    features = search_context(KNOWN).features(rows)
    time = Observations(features, ratio, np.full(rows.size, 0.01), np.ones(rows.size, dtype=np.int64))
    return replace(PastMeasurements.empty(), time=time)


def has_missed_gain(real: FloatArray, rows: IntArray, past: PastMeasurements) -> bool:
    """Search, and return whether something was left that is enough faster than the best."""
    slowest = int(rows[np.argmax(KNOWN.step_time_s[rows])])
    trials: list[Trial] = [trial_of(slowest, float(real[slowest]), 0)]
    while len(trials) < rows.size:
        row = STRATEGY.next(search_context(KNOWN, trials, open_rows=rows, past=past)).row
        if row is None:
            break
        trials.append(trial_of(row, float(real[row]), len(trials)))
    best = min(trial.measurement.step_time_s for trial in trials if trial.measurement)
    return bool(real[rows].min() * (1 + MIN_GAIN) < best)


@pytest.mark.parametrize(
    ("rough", "misled"),
    [
        (0.05, False),
        pytest.param(0.05, True, marks=pytest.mark.long),
        pytest.param(0.2, False, marks=pytest.mark.long),
        pytest.param(0.2, True, marks=pytest.mark.long),
    ],
)
def test_the_possible_gain_is_small_when_the_search_ends(rough: float, misled: bool) -> None:
    lost = 0
    for seed in range(8):
        rows = rows_of(seed)
        past = misleading(rows, seed) if misled else PastMeasurements.empty()
        lost += has_missed_gain(distorted(KNOWN, seed, spread=rough), rows, past)
    assert lost <= 1
