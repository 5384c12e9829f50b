"""The strategies: what `learned` tries next, within limits, and when it ends; `predicted` and `random`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flagcore.contracts import SearchContext
from flagcore.domain.chip import CORES, OTHERS_CORES
from flagcore.domain.features import Observations, PastMeasurements
from flagcore.domain.prediction import Belief, Predictions
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import PROBE, Trial, TrialState
from flagcore.tuner import learning
from flagcore.tuner.strategies import PREDICTED, RANDOM
from flagcore.tuner.strategies.learned import STRATEGY, believed
from tests import tasks
from tests import tasks as made_up
from tests.checks import given
from tests.tuner.strategies.contexts import ENGINE, SPACE, TASK, distorted, predictions, search_context, trial_of

KNOWN = predictions()


def search(
    known: Predictions,
    real: FloatArray,
    capacity: float = np.inf,
    memory: float = 1.0,
    *,
    most: int = len(SPACE),
    fails: Any = None,
    first: Sequence[Trial] = (),
    **context: Any,
) -> list[Trial]:
    """Run the strategy for at most `most` trials against a made-up ground truth, where what `fails` marks fails."""
    trials = [*first]
    while len(trials) < most:
        choice = STRATEGY.next(search_context(known, trials, **context))
        if (row := choice.row) is None:
            break
        needed = memory * float(known.device_used_bytes[row])
        done = trial_of(row, float(real[row]) if needed <= capacity else None, len(trials), needed)
        done = replace(done, believed=choice.belief)
        has_failed = fails is not None and fails[row]
        trials.append(replace(done, state=TrialState.FAILED, measurement=None) if has_failed else done)
    return trials


def best_of(trials: list[Trial]) -> float:
    return min(trial.measurement.step_time_s for trial in trials if trial.measurement)


@pytest.mark.parametrize(
    ("seed", "times", "most"),
    [(1, 3.0, 0.3), *(pytest.param(seed, 1.0, 0.2, marks=pytest.mark.slow) for seed in range(4))],
)
def test_it_ends_near_the_best_after_few_trials(seed: int, times: float, most: float) -> None:
    real = distorted(KNOWN, seed, spread=0.01, times=times)
    trials = search(KNOWN, real)
    assert len(trials) <= most * len(SPACE)
    assert best_of(trials) <= 1.02 * real.min()


@pytest.mark.slow
def test_without_any_predicted_time_only_trials_are_learned_from() -> None:
    unknown = np.full(len(SPACE), np.nan)
    untimed = replace(KNOWN, step_time_s=unknown, low_s=unknown, high_s=unknown)
    trials = search(untimed, KNOWN.step_time_s, most=25)
    mean_best = np.random.default_rng(0).choice(KNOWN.step_time_s, (200, 25)).min(axis=1).mean()
    assert best_of(trials) <= mean_best


@pytest.mark.slow
def test_after_out_of_memory_similar_candidates_are_avoided() -> None:
    capacity = float(np.quantile(KNOWN.device_used_bytes, 0.6))
    known = replace(KNOWN, capacity_bytes=capacity)
    real = distorted(known, 2, spread=0.01)
    fits = 1.3 * known.device_used_bytes <= capacity
    trials = search(known, real, capacity, memory=1.3)
    assert len([trial for trial in trials if trial.measurement is None]) <= 10
    assert best_of(trials) <= 1.03 * real[fits].min()


def test_a_choice_reports_its_corrected_prediction() -> None:
    first = int(np.argmin(KNOWN.step_time_s))
    chosen = STRATEGY.next(search_context(KNOWN, [trial_of(first, 2.0 * float(KNOWN.step_time_s[first]), 0)]))
    assert chosen.belief.low_s < chosen.belief.step_time_s < chosen.belief.high_s
    assert chosen.belief.step_time_s == pytest.approx(2.0 * KNOWN.step_time_s[given(chosen.row)], rel=0.25)


def test_of_equally_fast_candidates_the_one_closest_to_the_baseline_is_tried() -> None:
    step = np.ones(len(SPACE))
    context = search_context(replace(KNOWN, step_time_s=step, low_s=step, high_s=step), [])
    base = context.problem.baseline.as_dict()
    changed = [sum(SPACE.candidate(row).as_dict()[knob] != base[knob] for knob in base) for row in context.open_rows]
    row = given(STRATEGY.next(context).row)
    assert changed[context.open_rows.tolist().index(row)] == min(changed)


def test_pending_trials_make_similar_candidates_less_attractive() -> None:
    real = distorted(KNOWN, spread=0.0)
    order = np.argsort(KNOWN.step_time_s, kind="stable")
    trials = [trial_of(int(row), float(real[row]), number) for number, row in enumerate(order[40:43])]
    context, pending, rows = search_context(KNOWN, trials), list[Trial](), list[int]()
    for _ in range(4):
        busy = replace(context, pending=pending, open_rows=np.setdiff1d(context.open_rows, rows))
        chosen = STRATEGY.next(busy)
        assert chosen.row is not None
        rows.append(chosen.row)
        pending.append(replace(trial_of(chosen.row, 1.0, 9), state=TrialState.RUNNING, measurement=None))
    assert len(set(rows)) == 4
    sure = learning.expected_times(replace(context, pending=pending), learning.observed_times(context))
    assert np.exp(sure.log_ratio) == pytest.approx(real[rows] / KNOWN.step_time_s[rows], rel=0.3)
    assert len(learning.expected_times(context, learning.observed_times(context))) == 0
    before, after = (believed(replace(context, pending=some), rows[0]) for some in ((), pending))
    assert spread(after) < spread(before)


def spread(belief: Belief) -> float:
    return belief.high_s / belief.low_s


def probed(row: int, seconds: float | None, number: int, used: float | None = None) -> Trial:
    return replace(trial_of(row, seconds, number, used), fidelity=PROBE)


def test_probes_count_as_uncertain_trials_until_their_candidate_runs() -> None:
    step, needed = KNOWN.step_time_s, KNOWN.device_used_bytes
    probes = (probed(3, 1.5 * step[3], 0, 2 * needed[3]), probed(4, 1.5 * step[4], 1), probed(5, None, 2))
    seen = replace(search_context(KNOWN, [trial_of(4, 1.2 * step[4], 3)]), probes=probes)
    times = learning.observed_times(seen)
    assert np.exp(times.log_ratio).tolist() == pytest.approx([1.2, 1.5])
    assert times.noise.tolist() == [learning.MIN_NOISE, learning.PROBE_NOISE]
    memory = learning.observed_memory(seen)
    assert np.exp(memory.log_ratio[0]) == pytest.approx(2.0)
    assert len(memory) == 2
    assert memory.log_ratio[1] >= 0.5


def test_noise_is_the_spread_of_the_run_over_the_root_of_a_trial_s_steps() -> None:
    trials = [trial_of(row, float(KNOWN.step_time_s[row]), row) for row in range(4)]

    def with_spread(trial: Trial, spread: float, count: int) -> Trial:
        step = trial.measurement.step_time_s
        return replace(
            trial, measurement=replace(trial.measurement, spread_s=spread * step, step_times_s=(step,) * count)
        )

    even, noisy, default, interrupted = map(with_spread, trials, (0.0, 0.4, 0.1, 0.0), (4, 4, 4, 2))
    interrupted = replace(
        interrupted, state=TrialState.STOPPED, measurement=replace(given(interrupted.measurement), partial=True)
    )
    noise = learning.observed_times(search_context(KNOWN, [even, noisy, default, interrupted])).noise
    assert noise.tolist() == pytest.approx([0.1 / 2, 0.4 / 2, 0.1 / 2, 0.1 / np.sqrt(2)])
    assert learning.observed_times(search_context(KNOWN, [even, interrupted])).noise.tolist() == [
        learning.MIN_NOISE,
        learning.PARTIAL_NOISE,
    ]


@pytest.mark.parametrize(("others", "times"), [(0.0, 4.0), (1.0, 2.0)])
def test_a_large_ratio_of_a_trial_on_shared_cores_is_not_credible(others: float, times: float) -> None:
    slow = trial_of(0, 5.0 * float(KNOWN.step_time_s[0]), 0)
    measured = replace(given(slow.measurement), telemetry={CORES: 2.0, OTHERS_CORES: others})
    expected = learning.expected_step_times(search_context(KNOWN, [replace(slow, measurement=measured)]), np.arange(50))
    assert (np.median(expected / KNOWN.step_time_s[:50]) > times) is not bool(others)


@pytest.mark.parametrize(("count", "noise", "ends"), [(7, 0.06, True), (7, 0.0, False), (6, 0.06, False)])
def test_noise_ends_the_search_from_the_seventh_measurement_on(count: int, noise: float, ends: bool) -> None:
    real, trials = distorted(KNOWN, 3, spread=0.3), list[Trial]()
    for number, row in enumerate(np.argsort(KNOWN.step_time_s)[:count]):
        trial = trial_of(int(row), float(real[row]), number)
        assert trial.measurement is not None
        measurement = replace(trial.measurement, spread_s=noise * trial.measurement.step_time_s)
        trials.append(replace(trial, measurement=measurement, believed=tasks.belief(1.0, max_expected_gain=0.0)))
    assert (STRATEGY.next(search_context(KNOWN, trials)).row is None) == ends


def test_with_planned_steps_the_search_ends_when_a_trial_costs_more_than_it_may_save() -> None:
    trials = [
        trial_of(row, float(KNOWN.step_time_s[row]), at) for at, row in enumerate(np.argsort(KNOWN.step_time_s)[:2])
    ]
    context = search_context(KNOWN, [])
    assert STRATEGY.next(replace(context, trials=trials)).row is not None

    def planned(steps: int) -> SearchContext:
        spec = context.task.spec
        task = replace(context.task, spec=replace(spec, control=replace(spec.control, planned_steps=steps)))
        return replace(made_up.with_task(context, task), trials=trials)

    assert STRATEGY.next(planned(10)).row is None
    assert STRATEGY.next(planned(1_000_000)).row is not None


def test_an_out_of_memory_trial_without_figures_is_assumed_to_exceed_the_memory_slightly() -> None:
    row = int(np.argmax(KNOWN.device_used_bytes))
    bounds = []
    for share in (0.9, 0.01):
        small = replace(KNOWN, capacity_bytes=float(KNOWN.device_used_bytes[row]) / share)
        bounds.append(learning.observed_memory(search_context(small, [trial_of(row, None, 0)])).log_ratio[0])
    assert bounds == pytest.approx([learning.MIN_EXCESS - np.log(0.9), learning.MAX_EXCESS])


def test_before_the_first_run_probes_determine_the_fastest_candidate() -> None:
    first = given(STRATEGY.next(search_context(KNOWN)).row)
    slow = STRATEGY.next(
        replace(search_context(KNOWN), probes=[probed(first, 3.0 * float(KNOWN.step_time_s[first]), 0)])
    )
    assert slow.belief.step_time_s > 1.5 * KNOWN.step_time_s[slow.row]


def test_all_probes_cost_the_same_regardless_of_the_step_time() -> None:
    seen = search_context(KNOWN, [trial_of(0, float(KNOWN.step_time_s[0]), 0)])
    control = replace(seen.task.spec.control, fidelity=PROBE)
    alike = made_up.with_task(seen, replace(seen.task, spec=replace(seen.task.spec, control=control)))
    costs = [learning.full_trial_seconds(each, np.log(KNOWN.step_time_s)) for each in (seen, alike)]
    assert np.ptp(costs[0]) > 0
    assert np.ptp(costs[1]) == 0


@pytest.mark.parametrize("state", [TrialState.INVALID, TrialState.FAILED])
def test_partial_measurements_of_a_failed_trial_do_not_bound_the_time(state: TrialState) -> None:
    first = trial_of(0, float(KNOWN.step_time_s[0]), 0)
    broken = replace(trial_of(1, 0.1 * float(KNOWN.step_time_s[1]), 1), state=state)
    assert learning.observed_times(search_context(KNOWN, [first, broken])).log_ratio.tolist() == pytest.approx([0.0])


@pytest.mark.parametrize(
    ("knob", "value"), [("pipeline_model_parallel_size", 1), ("micro_batch_size", 4), ("use_distributed_optimizer", 1)]
)
def test_a_value_that_always_fails_is_detected_after_three_failures(knob: str, value: int) -> None:
    real = distorted(KNOWN, 5, spread=0.01)
    fails = SPACE.columns()[knob] == value
    trials = search(KNOWN, real, most=25, fails=fails)
    assert sum(trial.measurement is None for trial in trials) <= 3
    assert best_of(trials) <= 1.05 * real[~fails].min()


def test_expensive_failures_make_the_search_more_cautious() -> None:
    known = replace(KNOWN, capacity_bytes=float(np.quantile(KNOWN.device_used_bytes, 0.2)))
    tried = int(np.argmax(known.step_time_s))
    fit = trial_of(tried, 1.5 * float(known.step_time_s[tried]), 0, float(known.device_used_bytes[tried]))
    out = int(np.argmax(known.device_used_bytes))
    chances = []
    for seconds in (1.0, 3000.0):
        lost = replace(trial_of(out, None, 1), duration_s=seconds)
        choice = STRATEGY.next(search_context(known, [replace(fit, duration_s=60.0), lost]))
        chances.append(choice.belief.chance_to_fit)
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
    rows = np.argsort(KNOWN.step_time_s)
    trials = [
        trial_of(int(row), factor * float(KNOWN.step_time_s[row]), number)
        for number, (row, factor) in enumerate(zip(rows, factors, strict=False))
    ]
    assert (STRATEGY.next(search_context(KNOWN, trials, past=certain_experience())).row is None) == stops


def test_a_part_of_the_step_that_no_trial_measured_keeps_a_confirmed_search_going() -> None:
    rows = np.argsort(KNOWN.step_time_s)
    bubble = np.where(np.isin(np.arange(len(SPACE)), rows[:2]), 0.0, 0.5) * KNOWN.step_time_s
    known = replace(KNOWN, time_s={"compute_s": KNOWN.step_time_s - bubble, "bubble_s": bubble})
    trials = [trial_of(int(row), float(known.step_time_s[row]), number) for number, row in enumerate(rows[:2])]
    assert STRATEGY.next(search_context(known, trials, past=certain_experience())).row is not None


def test_no_trial_starts_that_takes_longer_than_the_remaining_time() -> None:
    first = int(np.argmax(KNOWN.step_time_s))
    seen = search_context(KNOWN, [trial_of(first, float(KNOWN.step_time_s[first]), 0)])
    assert STRATEGY.next(replace(seen, seconds_left=1e6)).row is not None
    reported = STRATEGY.next(replace(seen, seconds_left=1e-6))
    assert reported.row is None
    assert reported.because.startswith("no trial fits in the remaining 0 s")


LIMIT = {"ttft_s.p99": 1.0}
WORK = tasks.Service(engine="server", slo=LIMIT)


def known() -> Predictions:
    """The faster, the longer the first token takes: from 2 s of the fastest down to 0.5 s."""
    predicted = predictions(capacity=None)
    place = np.argsort(np.argsort(predicted.step_time_s))
    return dataclasses.replace(predicted, figures={"ttft_s.p99": 2.0 - 1.5 * place / place.max()})


def under_limits(trials: Sequence[Trial] = ()) -> SearchContext:
    seen = search_context(known(), trials)
    engine = SimpleNamespace(sizes=lambda task, columns: ENGINE.sizes(TASK, columns))
    return made_up.with_task(seen, replace(TASK, spec=replace(TASK.spec, work=WORK)), engine=engine)


def measured(row: int, number: int, times: float) -> Trial:
    """A trial of `row` whose first token took `times` as long as predicted."""
    predicted = known()
    trial = trial_of(row, float(predicted.step_time_s[row]), number)
    ttft = float(predicted.figures["ttft_s.p99"][row]) * times
    broken = (f"ttft_s.p99 is {ttft} s",) if ttft > LIMIT["ttft_s.p99"] else ()
    return dataclasses.replace(
        trial, measurement=dataclasses.replace(given(trial.measurement), figures={"ttft_s.p99": ttft}, broken=broken)
    )


def test_candidates_predicted_to_break_a_limit_are_not_tried_first() -> None:
    choice = STRATEGY.next(under_limits())
    assert known().figures["ttft_s.p99"][given(choice.row)] < 1.2


def test_a_latency_above_its_prediction_moves_the_search_to_candidates_with_lower_latency() -> None:
    first = given(STRATEGY.next(under_limits()).row)
    later = given(STRATEGY.next(under_limits([measured(first, 0, times=1.5)])).row)
    assert known().figures["ttft_s.p99"][later] < known().figures["ttft_s.p99"][first]


def test_the_search_ends_if_no_candidate_is_likely_to_meet_the_limits() -> None:
    rows = np.linspace(0, len(SPACE) - 1, 8).astype(int)
    choice = STRATEGY.next(under_limits([measured(int(row), n, times=20.0) for n, row in enumerate(rows)]))
    assert choice.row is None
    assert "meets the limits" in choice.because


def misleading(rows: IntArray, seed: int) -> PastMeasurements:
    """A past with smooth errors, in which other parts of a step are slow than in the task at hand."""
    ratio = np.log(distorted(KNOWN, 100 + seed, spread=0.02)[rows] / KNOWN.step_time_s[rows])
    features = search_context(KNOWN).features(rows)
    time = Observations(features, ratio, np.full(rows.size, 0.01), np.ones(rows.size, dtype=np.int64))
    return replace(PastMeasurements.empty(), time=time)


def has_missed_gain(real: FloatArray, rows: IntArray, past: PastMeasurements) -> bool:
    """Search, and return whether something was left that is enough faster than the best."""
    slowest = int(rows[np.argmax(KNOWN.step_time_s[rows])])
    first = [trial_of(slowest, float(real[slowest]), 0)]
    trials = search(KNOWN, real, most=rows.size, first=first, open_rows=rows, past=past)
    return bool(real[rows].min() * 1.01 < best_of(trials))


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
        rows = np.sort(np.random.default_rng(seed).choice(np.argsort(KNOWN.step_time_s)[:100], 40, replace=False))
        past = misleading(rows, seed) if misled else PastMeasurements.empty()
        lost += has_missed_gain(distorted(KNOWN, seed, spread=rough), rows, past)
    assert lost <= 1 + misled


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
