"""What trials teach: the best, durations, probabilities and memory, and what measurements let us believe."""

import math
from dataclasses import replace

import numpy as np
import pytest

from flagcore.domain.features import Observations
from flagcore.domain.space import FloatArray
from flagcore.domain.trial import PROBE, Role, Trial, TrialState
from flagcore.tuner.learning import (
    expected_seconds,
    expected_step_times,
    full_trial_seconds,
    min_memory_share,
    observed_times,
    overhead_seconds,
    success_probability,
)
from flagcore.tuner.ratios import MEMORY, TIME, Points, Ratios, covariance, time_scales, variance
from flagcore.tuner.stages.learn import learn
from tests import tasks
from tests.serving_trials import trial
from tests.tuner.strategies.contexts import SPACE, predictions, search_context, trial_of

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
    early = replace(trial, measurement=replace(trial.measurement, warmup_steps=control.warmup_iters - 1))
    early = replace(early, duration_s=trial.duration_s - trial.measurement.step_time_s)
    assert overhead_seconds(search_context(KNOWN, [early])) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("times", "known"),
    [(1.4, [pytest.approx(np.log(1.4))]), (0.5, [pytest.approx(0.0, abs=0.05)]), (20.0, [])],
    ids=["a bound", "expected", "hung"],
)
def test_a_time_out_is_a_bound_of_the_step_unless_the_trial_hung(times: float, known: list[object]) -> None:
    assert reported(timed_out(7, times, 20.0)) == known


def test_a_timed_out_probe_does_not_bound_the_step() -> None:
    probe = timed_out(7, 1.4, 20.0, fidelity=PROBE)
    assert observed_times(replace(search_context(KNOWN, measured()), probes=[probe])).log_ratio.size == 3


def test_finished_steps_of_a_trial_without_a_measurement_count() -> None:
    step = float(KNOWN.step_time_s[7])
    slow = timed_out(7, 0.1, 20.0, predicted=tasks.prediction(compute_s=step), finished_steps_s=(30 * step,))
    assert reported(slow) == [pytest.approx(np.log(30.0))]
    assert reported(replace(slow, finished_steps_s=(90 * step, 30 * step))) == [pytest.approx(np.log(30.0))]
    expected = expected_step_times(search_context(KNOWN, [slow]), np.arange(20)) / KNOWN.step_time_s[:20]
    assert (expected > 15).all()


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


OUT = [lost(row, TrialState.OUT_OF_MEMORY, seconds) for row, seconds in ((1, 300.0), (2, 500.0), (3, 400.0))]


@pytest.mark.parametrize(
    ("fits", "ends", "trials", "expected"),
    [
        (1.0, 1.0, [], WHOLE),
        (0.0, 1.0, [], 20.0 + STEP),  # the first out of memory: the start and a step
        (0.25, 1.0, OUT, 0.25 * WHOLE + 0.75 * 400.0),
        (1.0, 0.5, [lost(1, TrialState.TIMED_OUT, 1800.0)], 0.5 * WHOLE + 0.5 * 1800.0),
    ],
)
def test_a_trial_costs_as_much_time_as_earlier_ones_with_the_same_end(
    fits: float, ends: float, trials: list[Trial], expected: float
) -> None:
    assert cost(fits, ends, *trials) == pytest.approx(expected)


ROWS = np.arange(len(SPACE))
COLUMNS = SPACE.columns()


def out_of_memory(row: int, number: int, state: TrialState = TrialState.FAILED) -> Trial:
    return replace(trial_of(row, None, number), state=state)


def chances(*trials: Trial) -> np.ndarray:
    return success_probability(search_context(KNOWN, trials), ROWS)


def distances(row: int) -> np.ndarray:
    """In how many knobs each row differs from one."""
    different: np.ndarray = sum((column != column[row]).astype(int) for column in COLUMNS.values())
    return different


@pytest.mark.parametrize("state", [TrialState.FAILED, TrialState.INVALID, TrialState.TIMED_OUT])
def test_candidates_similar_to_a_failed_one_are_less_likely_to_succeed(state: TrialState) -> None:
    ends, far = chances(out_of_memory(0, 0, state)), distances(0)
    assert ends[far == far.min()].max() < ends[far == far.max()].min()
    assert ends[far == np.sort(np.unique(far))[1]].max() < 0.7
    assert ends.min() > 0.0


@pytest.mark.parametrize("state", [TrialState.OUT_OF_MEMORY, TrialState.INTERRUPTED])
def test_out_of_memory_and_interrupts_are_not_failures(state: TrialState) -> None:
    assert chances(out_of_memory(0, 0, state)).tolist() == [1.0] * len(SPACE)


def test_a_failure_is_attributed_to_the_value_without_successful_trials() -> None:
    sizes = COLUMNS["micro_batch_size"]
    broken = np.flatnonzero(sizes == 2)[:2]
    fine = [row for each in broken for row in np.flatnonzero((distances(each) <= 2) & (sizes != 2))[:3]]
    ended = [trial_of(int(row), 1.0, at) for at, row in enumerate(fine)]
    ends = chances(*ended, *(out_of_memory(int(row), 10 + at) for at, row in enumerate(broken)))
    assert ends[sizes == 2].max() < 0.25
    assert np.median(ends[sizes != 2]) > 0.8


def test_a_value_that_failed_once_among_many_successes_is_hardly_suspected() -> None:
    rows = np.flatnonzero(COLUMNS["micro_batch_size"] == 2)
    ended = [trial_of(int(row), 1.0, at) for at, row in enumerate(rows[1:9])]
    assert np.median(chances(*ended, out_of_memory(int(rows[0]), 10))[rows]) > 0.5


def test_the_least_memory_is_learned_with_an_uncertainty_that_more_trials_reduce() -> None:
    assert min_memory_share([]) == 1.0
    assert min_memory_share([0.0]) < min_memory_share([0.0] * 4) < min_memory_share([0.0] * 64) < 1.0
    few, many = (min_memory_share([math.log(0.7)] * count) for count in (1, 8))
    assert 0.6 < many < few * 1.05
    assert all(min_memory_share([math.log(ratio)] * 20) < ratio for ratio in (0.5, 0.7, 1.0, 1.3))


FAST, SLOW_RATIO = trial(1, 200.0, ttft=1.5), trial(2, 150.0, ttft=0.9)


def test_the_best_meets_every_limit_even_if_another_is_faster() -> None:
    for trials, best in (((trial(0, 100.0, role=Role.BASELINE), FAST, SLOW_RATIO), SLOW_RATIO), ((FAST,), None)):
        search_state = learn(trials)
        assert (search_state.best, search_state.fastest) == (best, FAST)


def test_a_candidate_that_breaks_a_limit_in_half_of_its_runs_is_not_the_best() -> None:
    again = trial(3, 150.0, ttft=1.2, role=Role.REPEAT, slots=2)
    assert learn((trial(0, 100.0), SLOW_RATIO, again)).best == trial(0, 100.0)
    twice = trial(4, 150.0, ttft=0.8, role=Role.REPEAT, slots=2)
    assert learn((trial(0, 100.0), SLOW_RATIO, again, twice)).best == SLOW_RATIO


def test_a_run_of_flagcore_replaces_an_imported_one() -> None:
    imported = replace(trial(1, 200.0), source="history.csv")
    assert learn((imported,)).speed_of(imported.candidate) == imported.speed
    again = replace(trial(2, 100.0, role=Role.REPEAT), candidate=imported.candidate)
    assert learn((imported, again)).speed_of(imported.candidate) == again.speed
    own = replace(trial(2, 100.0), candidate=imported.candidate)
    assert learn((imported, own)).trials == (own,)


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
