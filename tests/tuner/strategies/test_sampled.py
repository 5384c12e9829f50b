"""Strategies that do not learn a model: Optuna's samplers, predicted and random."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
from optuna.samplers import BaseSampler

from flagcore.domain.trial import Trial
from flagcore.errors import UsageError
from flagcore.tuner.strategies import PREDICTED, RANDOM
from flagcore.tuner.strategies.sampled import GP, TPE, Sampled
from tests.tuner.strategies.contexts import SPACE, predictions, search_context, trial_of

KNOWN = predictions()


def search(strategy: Sampled, most: int) -> list[Trial]:
    trials: list[Trial] = []
    while len(trials) < min(most, len(SPACE)):
        row = strategy.next(search_context(KNOWN, trials)).row
        assert row is not None
        trials.append(trial_of(row, float(KNOWN.step_time_s[row]), len(trials)))
    return trials


def best_of(trials: list[Trial]) -> float:
    return min(trial.measurement.step_time_s for trial in trials if trial.measurement)


@pytest.mark.slow
def test_a_gaussian_process_suggests_once_its_random_trials_are_over() -> None:
    pytest.importorskip("torch")
    assert len({trial.candidate for trial in search(GP, 12)}) == 12


def test_a_sampler_without_its_dependency_reports_it() -> None:
    def missing(seed: int) -> BaseSampler:
        raise ImportError("no module named torch")

    with pytest.raises(UsageError, match=r"gp.*no module named torch"):
        Sampled("gp", missing).next(search_context(KNOWN))


def test_tpe_tries_open_rows_and_learns_from_their_times() -> None:
    trials = search(TPE, 24)
    assert len({trial.candidate for trial in trials}) == 24
    chance = np.random.default_rng(0)
    by_chance = np.mean([chance.choice(KNOWN.step_time_s, 24, replace=False).min() for _ in range(500)])
    assert best_of(trials) <= by_chance


def test_a_resumed_run_chooses_as_an_uninterrupted_one() -> None:
    trials = search(TPE, 14)
    again = importlib.reload(importlib.import_module("flagcore.tuner.strategies.sampled")).TPE
    assert again.next(search_context(KNOWN, trials[:12])).row == SPACE.find(trials[12].candidate)


def test_closed_candidates_are_never_chosen() -> None:
    only = np.array([5])
    reported = TPE.next(search_context(KNOWN, open_rows=only))
    assert reported.row == 5


def test_a_trial_that_ran_out_of_memory_counts_as_slow() -> None:
    small = float(np.median(KNOWN.device_used_bytes))
    trials: list[Trial] = []
    for _ in range(30):
        row = TPE.next(search_context(KNOWN, trials)).row
        assert row is not None
        fits = KNOWN.device_used_bytes[row] <= small
        trials.append(trial_of(row, float(KNOWN.step_time_s[row]) if fits else None, len(trials)))
    lost = [trial.measurement is None for trial in trials]
    assert sum(lost[15:]) < sum(lost[:15])


def test_the_fastest_predicted_comes_first() -> None:
    seen = search_context(open_rows=np.arange(0, len(SPACE), 2))
    chosen = PREDICTED.next(seen).row
    assert chosen in seen.open_rows
    assert seen.predictions.step_time_s[chosen] == seen.predictions.step_time_s[seen.open_rows].min()


def test_ties_in_time_are_ordered_by_memory_and_unknown_times_are_tried_last() -> None:
    known, unknown = search_context().predictions, np.full(len(SPACE), np.nan)
    tied = search_context(replace(known, step_time_s=np.ones_like(known.step_time_s)))
    assert known.device_used_bytes[PREDICTED.next(tied).row] == known.device_used_bytes.min()
    unknown[3] = 1.0
    assert PREDICTED.next(search_context(replace(known, step_time_s=unknown))).row == 3


def test_random_search_draws_open_rows_reproducibly() -> None:
    seen = search_context(open_rows=np.arange(3, len(SPACE), 7))
    rows = [RANDOM.next(seen).row for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0] in seen.open_rows
