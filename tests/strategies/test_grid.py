"""FlagScale's order and rules as a strategy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.flagscale_rules import FlagScale
from flagcore.domain.trial import Role, Trial
from flagcore.importers.flagscale.grid import STRATEGY
from tests.strategies.contexts import SPACE, predictions, search_context, trial_of

pytestmark = pytest.mark.slow

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


def test_a_baseline_is_not_tried_again() -> None:
    fits = np.ones(len(SPACE), dtype=np.bool_)
    third = run_grid(fits, 3)[0][2]
    rows, _ = run_grid(fits, 8, baseline=third)
    assert rows[0] == third
    assert rows.count(third) == 1
    assert len(rows) == 8
