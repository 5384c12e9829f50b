"""The search that learns: near the best in few trials, and honest about the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flagcore.contracts import SearchContext
from flagcore.domain.experience import Observations, PastMeasurements
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import FloatArray
from flagcore.domain.trial import PROBE, Trial, TrialState
from flagcore.learning.trials import (
    MAX_EXCESS,
    MIN_EXCESS,
    MIN_NOISE,
    PARTIAL_NOISE,
    PROBE_NOISE,
    expected_times,
    full_trial_seconds,
    observed_memory,
    observed_times,
)
from flagcore.strategies.learned import STRATEGY, believed
from tests.strategies.contexts import SPACE, distorted, predictions, ran, search_context


def search(known: Predictions, real: FloatArray, capacity: float = np.inf, memory: float = 1.0) -> list[Trial]:
    """Run the strategy to its end against a made-up ground truth."""
    trials: list[Trial] = []
    while len(trials) < len(SPACE):
        row = STRATEGY.next(search_context(known, trials)).row
        if row is None:
            break
        need = memory * float(known.device_used_bytes[row])
        trials.append(ran(row, float(real[row]) if need <= capacity else None, len(trials), need))
    return trials


def best_of(trials: list[Trial]) -> float:
    return min(trial.measurement.step_time_s for trial in trials if trial.measurement)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_it_ends_near_the_best_after_few_trials(seed: int) -> None:
    known = predictions()
    real = distorted(known, seed, spread=0.01)
    trials = search(known, real)
    assert len(trials) <= 0.2 * len(SPACE)
    assert best_of(trials) <= 1.02 * real.min()


def test_a_model_three_times_off_still_ends_near_the_best() -> None:
    known = predictions()
    real = distorted(known, 1, spread=0.01, times=3.0)
    trials = search(known, real)
    assert len(trials) <= 0.3 * len(SPACE)
    assert best_of(trials) <= 1.02 * real.min()


@pytest.mark.slow
def test_without_any_predicted_time_only_trials_are_learned_from() -> None:
    known = predictions()
    nothing = np.full(len(SPACE), np.nan)
    blind = replace(known, step_time_s=nothing, low_s=nothing, high_s=nothing)
    trials: list[Trial] = []
    for number in range(25):
        row = STRATEGY.next(search_context(blind, trials)).row
        if row is None:
            break
        trials.append(ran(row, float(known.step_time_s[row]), number))
    chance = np.random.default_rng(0).choice(known.step_time_s, (200, 25)).min(axis=1).mean()
    assert best_of(trials) <= chance


@pytest.mark.slow
def test_after_out_of_memory_similar_candidates_are_avoided() -> None:
    known = predictions()
    capacity = float(np.quantile(known.device_used_bytes, 0.5))
    known = replace(known, capacity_bytes=capacity)
    real = distorted(known, 2, spread=0.01)
    fits = 1.3 * known.device_used_bytes <= capacity
    trials = search(known, real, capacity, memory=1.3)
    lost = [trial for trial in trials if trial.measurement is None]
    assert len(lost) <= 10
    assert best_of(trials) <= 1.03 * real[fits].min()


def test_it_reports_how_likely_a_gain_is_left_when_it_ends() -> None:
    known = predictions()
    trials = search(known, known.step_time_s)
    reported = STRATEGY.next(search_context(known, trials))
    assert reported.row is None
    assert "the chance that an untried candidate is more than 1% faster than the best is" in reported.because


def test_a_choice_reports_its_corrected_prediction() -> None:
    known = predictions()
    first = int(np.argmin(known.step_time_s))
    chosen = STRATEGY.next(search_context(known, [ran(first, 2.0 * float(known.step_time_s[first]), 0)]))
    assert chosen.row is not None
    step = chosen.belief["step_time_s"]
    assert isinstance(step, dict)
    assert step["low"] < step["value"] < step["high"]
    assert step["value"] == pytest.approx(2.0 * known.step_time_s[chosen.row], rel=0.25)


def test_pending_trials_make_similar_candidates_less_attractive() -> None:
    known = predictions()
    real = distorted(known, spread=0.0)
    order = np.argsort(known.step_time_s, kind="stable")
    trials = [ran(int(row), float(real[row]), number) for number, row in enumerate(order[40:43])]
    alone, pending, rows = search_context(known, trials), list[Trial](), list[int]()
    for _ in range(4):
        busy = replace(alone, pending=pending, open_rows=np.setdiff1d(alone.open_rows, rows))
        chosen = STRATEGY.next(busy)
        assert chosen.row is not None
        rows.append(chosen.row)
        pending.append(replace(ran(chosen.row, 1.0, 9), state=TrialState.RUNNING, measurement=None))
    assert len(set(rows)) == 4
    sure = expected_times(replace(alone, pending=pending), observed_times(alone))
    assert np.exp(sure.log_ratio) == pytest.approx(real[rows] / known.step_time_s[rows], rel=0.3)
    assert len(expected_times(alone, observed_times(alone))) == 0
    before, after = (believed(replace(alone, pending=some), rows[0]) for some in ((), pending))
    assert spread(after) < spread(before)


def spread(belief: Mapping[str, Any]) -> float:
    return float(belief["step_time_s"]["high"] / belief["step_time_s"]["low"])


def probed(row: int, seconds: float | None, number: int, used: float | None = None) -> Trial:
    return replace(ran(row, seconds, number, used), fidelity=PROBE)


def test_probes_count_as_uncertain_trials_until_their_candidate_runs() -> None:
    known = predictions()
    step, need = known.step_time_s, known.device_used_bytes
    probes = (probed(3, 1.5 * step[3], 0, 2 * need[3]), probed(4, 1.5 * step[4], 1), probed(5, None, 2))
    seen = replace(search_context(known, [ran(4, 1.2 * step[4], 3)]), probes=probes)
    times = observed_times(seen)
    assert np.exp(times.log_ratio).tolist() == pytest.approx([1.2, 1.5])
    assert times.noise.tolist() == [MIN_NOISE, PROBE_NOISE]
    memory = observed_memory(seen)
    assert np.exp(memory.log_ratio[0]) == pytest.approx(2.0)
    assert len(memory) == 2
    assert memory.log_ratio[1] >= 0.5


def test_noise_is_the_spread_of_the_run_over_the_root_of_a_trial_s_steps() -> None:
    known = predictions()
    trials = [ran(row, float(known.step_time_s[row]), row) for row in range(4)]

    def with_spread(trial: Trial, spread: float, count: int) -> Trial:
        assert trial.measurement is not None
        step = trial.measurement.step_time_s
        return replace(
            trial, measurement=replace(trial.measurement, spread_s=spread * step, step_times_s=(step,) * count)
        )

    even, rough, usual, cut = map(with_spread, trials, (0.0, 0.4, 0.1, 0.0), (4, 4, 4, 2))
    assert cut.measurement is not None
    cut = replace(cut, state=TrialState.STOPPED, measurement=replace(cut.measurement, partial=True))
    noise = observed_times(search_context(known, [even, rough, usual, cut])).noise
    assert noise.tolist() == pytest.approx([0.1 / 2, 0.4 / 2, 0.1 / 2, 0.1 / np.sqrt(2)])
    assert observed_times(search_context(known, [even, cut])).noise.tolist() == [MIN_NOISE, PARTIAL_NOISE]


def test_with_planned_steps_the_search_ends_when_a_trial_costs_more_than_it_may_save() -> None:
    known = predictions()
    trials = [ran(row, float(known.step_time_s[row]), at) for at, row in enumerate(np.argsort(known.step_time_s)[:2])]
    context = search_context(known, [])
    assert STRATEGY.next(replace(context, trials=trials)).row is not None

    def planned(steps: int) -> SearchContext:
        spec = context.task.spec
        control = replace(spec.control, planned_steps=steps)
        return replace(context, trials=trials, task=replace(context.task, spec=replace(spec, control=control)))

    assert STRATEGY.next(planned(10)).row is None
    assert STRATEGY.next(planned(1_000_000)).row is not None


def test_an_out_of_memory_trial_without_figures_is_assumed_to_exceed_the_memory_slightly() -> None:
    known = predictions()
    row = int(np.argmax(known.device_used_bytes))
    bounds = []
    for share in (0.9, 0.01):
        tight = replace(known, capacity_bytes=float(known.device_used_bytes[row]) / share)
        bounds.append(observed_memory(search_context(tight, [ran(row, None, 0)])).log_ratio[0])
    assert bounds == pytest.approx([MIN_EXCESS - np.log(0.9), MAX_EXCESS])


def test_before_any_run_probes_decide_what_is_the_fastest() -> None:
    known = predictions()
    first = STRATEGY.next(search_context(known)).row
    assert first is not None
    slow = STRATEGY.next(
        replace(search_context(known), probes=[probed(first, 3.0 * float(known.step_time_s[first]), 0)])
    )
    assert slow.belief["step_time_s"]["value"] > 1.5 * known.step_time_s[slow.row]  # type: ignore[index]


def test_all_probes_cost_the_same_regardless_of_the_step_time() -> None:
    known = predictions()
    seen = search_context(known, [ran(0, float(known.step_time_s[0]), 0)])
    control = replace(seen.task.spec.control, fidelity=PROBE)
    task = replace(seen.task, spec=replace(seen.task.spec, control=control))
    alike = replace(seen, task=task)
    costs = [full_trial_seconds(each, np.log(known.step_time_s)) for each in (seen, alike)]
    assert np.ptp(costs[0]) > 0
    assert np.ptp(costs[1]) == 0


@pytest.mark.parametrize("state", [TrialState.INVALID, TrialState.FAILED])
def test_partial_measurements_of_a_failed_trial_do_not_bound_the_time(state: TrialState) -> None:
    known = predictions()
    first = ran(0, float(known.step_time_s[0]), 0)
    broken = replace(ran(1, 0.1 * float(known.step_time_s[1]), 1), state=state)
    assert observed_times(search_context(known, [first, broken])).log_ratio.tolist() == pytest.approx([0.0])


def broken_by(known: Predictions, real: FloatArray, fails: np.ndarray, most: int) -> list[Trial]:
    """Run the strategy, where what `fails` marks fails."""
    trials: list[Trial] = []
    while len(trials) < most:
        row = STRATEGY.next(search_context(known, trials)).row
        if row is None:
            break
        done = ran(row, float(real[row]), len(trials))
        trials.append(replace(done, state=TrialState.FAILED, measurement=None) if fails[row] else done)
    return trials


@pytest.mark.parametrize(
    ("knob", "value"), [("tensor_model_parallel_size", 1), ("micro_batch_size", 4), ("use_distributed_optimizer", 1)]
)
def test_a_value_that_always_fails_is_detected_after_at_most_three_failures(knob: str, value: int) -> None:
    known = predictions()
    real = distorted(known, 5, spread=0.01)
    fails = SPACE.columns()[knob] == value
    trials = broken_by(known, real, fails, 25)
    assert sum(trial.measurement is None for trial in trials) <= 3
    assert best_of(trials) <= 1.05 * real[~fails].min()


def test_expensive_failures_make_the_search_more_cautious() -> None:
    known = predictions()
    known = replace(known, capacity_bytes=float(np.quantile(known.device_used_bytes, 0.4)))
    tried = int(np.argmax(known.step_time_s))
    fit = ran(tried, 1.5 * float(known.step_time_s[tried]), 0, float(known.device_used_bytes[tried]))
    out = int(np.argmax(known.device_used_bytes))
    chances = []
    for seconds in (1.0, 3000.0):
        lost = replace(ran(out, None, 1), duration_s=seconds)
        choice = STRATEGY.next(search_context(known, [replace(fit, duration_s=60.0), lost]))
        chances.append(choice.belief["chance_to_fit"])
    assert chances[0] < 0.99 * chances[1]  # type: ignore[operator]


def certain_experience() -> PastMeasurements:
    """Measurements of all candidates in another task, each as predicted."""
    rows = np.arange(len(SPACE))
    noise, task = np.full(rows.size, 0.01), np.ones(rows.size, dtype=np.int64)
    times = Observations(search_context(predictions()).features(rows), np.zeros(rows.size), noise, task)
    return replace(PastMeasurements.empty(), time=times)


@pytest.mark.parametrize(
    ("factors", "stops"),
    [((1.0,), False), ((1.0, 1.0), True), ((1.0, 1.1), False), ((1.0, 1.0, 1.0), True)],
    ids=["one measurement", "two as expected", "two, one slower", "three"],
)
def test_experience_ends_a_run_after_two_measurements_that_confirm_it(factors: tuple[float, ...], stops: bool) -> None:
    known = predictions()
    rows = np.argsort(known.step_time_s)
    trials = [
        ran(int(row), factor * float(known.step_time_s[row]), number)
        for number, (row, factor) in enumerate(zip(rows, factors, strict=False))
    ]
    choice = STRATEGY.next(search_context(known, trials, past=certain_experience()))
    assert (choice.row is None) == stops


def test_a_part_of_the_step_that_no_trial_measured_keeps_a_confirmed_search_going() -> None:
    known = predictions()
    rows = np.argsort(known.step_time_s)
    bubble = np.where(np.isin(np.arange(len(SPACE)), rows[:2]), 0.0, 0.5) * known.step_time_s
    known = replace(known, time_s={"compute_s": known.step_time_s - bubble, "bubble_s": bubble})
    trials = [ran(int(row), float(known.step_time_s[row]), number) for number, row in enumerate(rows[:2])]
    assert STRATEGY.next(search_context(known, trials, past=certain_experience())).row is not None


def test_no_fit_is_reported_without_an_empty_figure() -> None:
    known = replace(predictions(), capacity_bytes=1.0)
    trials = [ran(row, float(known.step_time_s[row]), row, 0.5) for row in range(3)]
    assert "nan" not in STRATEGY.next(search_context(known, trials)).because


def test_no_trial_starts_that_takes_longer_than_what_is_left() -> None:
    known = predictions()
    first = int(np.argmax(known.step_time_s))
    seen = search_context(known, [ran(first, float(known.step_time_s[first]), 0)])
    assert STRATEGY.next(replace(seen, seconds_left=1e6)).row is not None
    reported = STRATEGY.next(replace(seen, seconds_left=1e-6))
    assert reported.row is None
    assert reported.because.startswith("no trial fits in the remaining 0 s")
