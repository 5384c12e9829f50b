"""The same candidate alone and while other trials run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagcore.domain.interference import interference
from flagcore.domain.trial import PROBE, Role, Trial, TrialState
from flagcore.stages.learn import learn
from tests.domain.test_noise import trial

SINGLE = trial(0, "base", 100.0, Role.BASELINE)


def parallel_trial(
    number: int, speed: float, role: Role = Role.INTERFERENCE, who: str = "base", spread: float = 0.0
) -> Trial:
    return replace(trial(number, who, speed, role, spread), group=0)


@pytest.mark.parametrize(
    ("speed", "spread", "quiet"),
    [
        (100.0, 0.0, True),
        (99.0, 0.0, True),
        (120.0, 0.0, True),
        (96.0, 0.0, False),
        (96.0, 0.1, True),
        (80.0, 0.9, False),
    ],
)
def test_a_slowdown_must_be_within_the_noise_and_small(speed: float, spread: float, quiet: bool) -> None:
    found = interference([trial(0, "base", 100.0, Role.BASELINE, spread), parallel_trial(1, speed)])
    assert found is not None
    assert found.slowdown == pytest.approx(100.0 / speed - 1.0)
    assert found.is_negligible is quiet


def test_a_run_that_fails_while_others_run_counts_as_interference() -> None:
    failed = replace(parallel_trial(1, 100.0), state=TrialState.OUT_OF_MEMORY, measurement=None)
    found = interference([SINGLE, failed])
    assert found is not None
    assert not found.is_negligible


def test_it_is_unknown_without_both_runs() -> None:
    interrupted = replace(parallel_trial(1, 100.0), state=TrialState.INTERRUPTED, measurement=None)
    probe = replace(SINGLE, fidelity=PROBE)
    for known in ([SINGLE], [SINGLE, interrupted], [parallel_trial(1, 100.0)], [probe, parallel_trial(1, 100.0)]):
        assert interference(known) is None


def test_disturbed_trials_are_ignored() -> None:
    disturbed = [SINGLE, parallel_trial(1, 50.0), parallel_trial(2, 150.0, Role.SEARCH, "a")]
    known = learn(disturbed)
    assert known.best == SINGLE
    assert disturbed[2].candidate not in known.settled
    again = learn([*disturbed, trial(3, "a", 130.0)])
    assert again.best is not None
    assert again.best.number == 3
    quiet = learn([SINGLE, parallel_trial(1, 99.0), parallel_trial(2, 150.0, Role.SEARCH, "a")])
    assert quiet.best is not None
    assert quiet.best.number == 2
