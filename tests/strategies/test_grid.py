"""FlagScale's order and rules as a strategy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.flagscale_rules import FlagScale
from flagcore.domain.trial import Role, Trial
from flagcore.importers.flagscale.grid import STRATEGY
from tests.strategies.contexts import SPACE, predictions, ran, search_context

pytestmark = pytest.mark.slow

KNOWN = predictions()


def walked(fits: np.ndarray, most: int, baseline: int | None = None) -> tuple[list[int], list[str]]:
    """Let the strategy run at most so many trials, where `fits` says what does not run out of memory."""
    trials: list[Trial] = []
    reasons: list[str] = []
    if baseline is not None:
        trials.append(replace(ran(baseline, float(KNOWN.step_time_s[baseline]), 0), role=Role.BASELINE))
    while True:
        rows = [row for trial in trials if (row := SPACE.find(trial.candidate)) is not None]
        seen = search_context(KNOWN, trials)
        if not seen.open_rows.size or len(trials) == most:
            return rows, reasons
        choice = STRATEGY.next(seen)
        reasons.append(choice.because)
        if choice.row is None:
            return rows, reasons
        trials.append(ran(choice.row, float(KNOWN.step_time_s[choice.row]) if fits[choice.row] else None, len(trials)))


@pytest.mark.parametrize(("share", "most"), [(0.4, len(SPACE)), (1.0, 40)])
def test_it_runs_what_flagscales_tuner_runs_in_the_same_order(share: float, most: int) -> None:
    fits = KNOWN.device_used_bytes <= np.quantile(KNOWN.device_used_bytes, share)
    tuner = FlagScale([SPACE.candidate(row).as_dict() for row in range(len(SPACE))])
    expected = []
    while len(expected) < most and (row := tuner.next()) is not None:
        expected.append(row)
        tuner.tell(float(KNOWN.step_time_s[row]) if fits[row] else None)
    rows, reasons = walked(fits, most)
    assert rows == expected
    named = {entry.pruned_by for entry in tuner.history if entry.pruned_by}
    assert named
    assert {name for name in named if any(f" {name} " in reason for reason in reasons)} == named


def test_a_baseline_is_not_tried_again() -> None:
    fits = np.ones(len(SPACE), dtype=np.bool_)
    third = walked(fits, 3)[0][2]
    rows, _ = walked(fits, 8, baseline=third)
    assert rows[0] == third
    assert rows.count(third) == 1
    assert len(rows) == 8
