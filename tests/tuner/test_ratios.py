"""What measurements let us believe: rough errors, a past that holds or does not, and what is alike."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.prediction import Observations
from flagcore.domain.space import FloatArray
from flagcore.tuner.ratios import MEMORY, TIME, Points, Ratios, covariance, time_scales, variance
from tests.tuner.strategies.contexts import SPACE, predictions, search_context

KNOWN = predictions()
ROWS = np.arange(len(SPACE))
ALL = search_context(KNOWN).features(ROWS)
TRIED_ROWS = np.random.default_rng(0).permutation(len(SPACE))[:40]


def observed(rows: np.ndarray, ratio: FloatArray, task: int = 0) -> Observations:
    return Observations(ALL.take(rows), ratio[rows], np.full(rows.size, 0.01), np.full(rows.size, task, dtype=np.int64))


def by_parts(wrong: float) -> FloatArray:
    """The logarithm of measured over predicted where parts of the step are off, in turns one way and the other."""
    parts = sum(share * np.exp(wrong if at % 2 else -wrong) for at, share in enumerate(ALL.parts.values()))
    ratio: FloatArray = np.log(parts)
    return ratio


@pytest.mark.parametrize("rough", [0.01, 0.05, 0.2, 0.3])
def test_the_roughness_of_errors_is_learned_from_trials(rough: float) -> None:
    ratio = np.random.default_rng(1).normal(0.0, rough, len(SPACE))
    untried = np.setdiff1d(ROWS, TRIED_ROWS)
    deviation = Ratios(observed(TRIED_ROWS, ratio), ALL, TIME).posterior(ALL.take(untried)).deviation
    assert 0.7 * rough < np.median(deviation) < 1.4 * rough + 0.03


def test_consistent_experience_is_used_from_the_start() -> None:
    ratio = by_parts(0.3)
    without_experience, experienced = (
        Ratios(Observations.join([*past, observed(TRIED_ROWS[:3], ratio)]), ALL, TIME).posterior(ALL)
        for past in ([], [observed(ROWS[::3], ratio, task=1)])
    )
    assert np.abs(experienced.mean - ratio).mean() < 0.5 * np.abs(without_experience.mean - ratio).mean()


def test_contradicted_experience_is_ignored() -> None:
    past, real = observed(ROWS[::3], by_parts(-0.4), task=1), by_parts(0.4)
    posterior = Ratios(Observations.join([past, observed(TRIED_ROWS[:8], real)]), ALL, TIME).posterior(ALL)
    without_experience = Ratios(observed(TRIED_ROWS[:8], real), ALL, TIME).posterior(ALL)
    assert np.abs(posterior.mean - real).mean() < 1.5 * np.abs(without_experience.mean - real).mean()
    assert np.mean(np.abs(posterior.mean - real) < 2 * posterior.deviation) > 0.9


@pytest.mark.parametrize("scales", [TIME, MEMORY])
def test_before_any_measurement_the_prediction_is_used(scales: object) -> None:
    posterior = Ratios(Observations.empty(), ALL, scales).posterior(ALL)  # type: ignore[arg-type]
    assert posterior.mean == pytest.approx(0.0)
    assert (posterior.deviation > scales.chip).all()  # type: ignore[attr-defined]


def test_errors_correlate_less_between_tasks_than_within_a_task() -> None:
    first = Points.from_features(ALL, np.zeros(len(SPACE)))
    second = Points.from_features(ALL, np.ones(len(SPACE)))
    within, between = covariance(TIME, first, first), covariance(TIME, first, second)
    assert np.diag(within) == pytest.approx(variance(TIME, first))
    shared = TIME.part_of_task**2 * (first.parts**2).sum(axis=1)
    assert np.diag(within - between) == pytest.approx(TIME.task**2 + TIME.own**2 + shared)
    assert np.linalg.eigvalsh(within).min() > -1e-9


@pytest.mark.parametrize("task", [0, 1])
def test_noise_is_a_standard_deviation_of_logarithms(task: int) -> None:
    def posterior_mean(noise: float) -> float:
        row = ROWS[:1]
        observation = Observations(ALL.take(row), np.array([0.3]), np.array([noise]), np.array([task]))
        return float(Ratios(observation, ALL, TIME).posterior(ALL.take(row)).mean[0])

    assert posterior_mean(0.01) == pytest.approx(posterior_mean(0.0), rel=0.01)
    assert posterior_mean(0.3) < 0.7 * posterior_mean(0.01)


def test_experience_that_held_narrows_the_intervals_and_trials_that_held_do_not() -> None:
    rows, exact = np.arange(0, len(ALL), 2), np.zeros(len(ALL))

    def width(task: int) -> float:
        ratios = Ratios(observed(rows, exact, task), ALL, TIME)
        return float(np.mean([process.fit.scale for process in ratios._processes]))

    assert width(task=1) < 0.5
    assert width(task=0) == 1.0


def test_one_trial_corrects_all_predictions_if_their_intervals_are_wide() -> None:
    assert time_scales(KNOWN) == TIME
    unsure = replace(KNOWN, low_s=KNOWN.step_time_s / 2.5, high_s=KNOWN.step_time_s * 2.5)
    ratio = np.full(len(SPACE), np.log(1.9))
    expected = [
        Ratios(observed(ROWS[:1], ratio), ALL, time_scales(predicted)).posterior(ALL.take(ROWS[1:])).mean
        for predicted in (KNOWN, unsure)
    ]
    assert np.median(np.exp(ratio[1:] - expected[1])) < 1.15 < np.median(np.exp(ratio[1:] - expected[0]))
    unknown = np.full(len(SPACE), np.nan)
    assert time_scales(replace(KNOWN, low_s=unknown, high_s=unknown)) == TIME


@pytest.mark.parametrize("factor", [1 / 9, 9.0, 26.0])
def test_a_large_factor_that_all_trials_share_is_that_of_the_run(factor: float) -> None:
    ratio = np.full(len(SPACE), np.log(factor))
    untried = ALL.take(np.setdiff1d(ROWS, TRIED_ROWS))
    one, two = (Ratios(observed(TRIED_ROWS[:count], ratio), ALL, TIME).posterior(untried).mean for count in (1, 2))
    assert np.median(np.abs(one - ratio[0])) < np.log(1.5)
    assert np.median(np.abs(two - ratio[0])) < np.log(1.25)
    ratio[TRIED_ROWS[1]] = 0.0
    assert (Ratios(observed(TRIED_ROWS[:2], ratio), ALL, TIME).posterior(untried).deviation > 0.5).all()
