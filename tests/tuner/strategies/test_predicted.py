"""The strategies predicted, random and grid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.flagscale_rules import FlagScale
from flagcore.domain.trial import Role, Trial
from flagcore.engines.flagscale.grid import STRATEGY
from flagcore.tuner.strategies import predicted, random_search
from tests.tuner.strategies.contexts import SPACE, predictions, search_context, trial_of


def test_the_fastest_predicted_comes_first() -> None:
    seen = search_context(open_rows=np.arange(0, len(SPACE), 2))
    chosen = predicted.STRATEGY.next(seen).row
    assert chosen in seen.open_rows
    assert seen.predictions.step_time_s[chosen] == seen.predictions.step_time_s[seen.open_rows].min()


def test_ties_in_time_are_ordered_by_memory() -> None:
    known = search_context().predictions
    seen = search_context(replace(known, step_time_s=np.ones_like(known.step_time_s)))
    chosen = predicted.STRATEGY.next(seen).row
    assert known.device_used_bytes[chosen] == known.device_used_bytes.min()


def test_unknown_times_are_tried_last() -> None:
    unknown = np.full(len(SPACE), np.nan)
    unknown[3] = 1.0
    assert predicted.STRATEGY.next(search_context(replace(search_context().predictions, step_time_s=unknown))).row == 3


def test_random_search_draws_open_rows_reproducibly() -> None:
    seen = search_context(open_rows=np.arange(3, len(SPACE), 7))
    rows = [random_search.STRATEGY.next(seen).row for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0] in seen.open_rows


KNOWN = predictions()


def run_grid(fits: np.ndarray, limit: int, baseline: int | None = None) -> tuple[list[int], list[str]]:
    """Let the strategy run at most `limit` trials, where `fits` says what does not run out of memory."""
    trials: list[Trial] = []
    reasons: list[str] = []
    if baseline is not None:
        trials.append(replace(trial_of(baseline, float(KNOWN.step_time_s[baseline]), 0), role=Role.BASELINE))
    while True:
        rows = [row for trial in trials if (row := SPACE.find(trial.candidate)) is not None]
        seen = search_context(KNOWN, trials)
        if not seen.open_rows.size or len(trials) == limit:
            return rows, reasons
        choice = STRATEGY.next(seen)
        reasons.append(choice.because)
        if choice.row is None:
            return rows, reasons
        trials.append(
            trial_of(choice.row, float(KNOWN.step_time_s[choice.row]) if fits[choice.row] else None, len(trials))
        )


@pytest.mark.slow
@pytest.mark.parametrize(("share", "limit"), [(0.4, len(SPACE)), (1.0, 40)])
def test_it_runs_the_same_strategies_as_flagscale_in_the_same_order(share: float, limit: int) -> None:
    fits = KNOWN.device_used_bytes <= np.quantile(KNOWN.device_used_bytes, share)
    tuner = FlagScale([SPACE.candidate(row).as_dict() for row in range(len(SPACE))])
    expected = []
    while len(expected) < limit and (row := tuner.next()) is not None:
        expected.append(row)
        tuner.tell(float(KNOWN.step_time_s[row]) if fits[row] else None)
    rows, reasons = run_grid(fits, limit)
    assert rows == expected
    named = {entry.pruned_by for entry in tuner.history if entry.pruned_by}
    assert named
    assert {name for name in named if any(f" {name} " in reason for reason in reasons)} == named


@pytest.mark.slow
def test_a_baseline_is_not_tried_again() -> None:
    fits = np.ones(len(SPACE), dtype=np.bool_)
    third = run_grid(fits, 3)[0][2]
    rows, _ = run_grid(fits, 8, baseline=third)
    assert rows[0] == third
    assert rows.count(third) == 1
    assert len(rows) == 8
