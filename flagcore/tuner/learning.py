"""Estimates for untried candidates from finished trials.

They are the ratios of measured to predicted values, the duration of a trial, the probabilities that it succeeds,
fits and meets the limits, and its expected gain.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from statistics import median

import numpy as np
import scipy

from flagcore.contracts import SearchContext
from flagcore.domain.chip import share_of_others
from flagcore.domain.features import Features, Observations
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.spec import Control
from flagcore.domain.trial import FAILED_STATES, PROBE, RUN, TIMED_STATES, Measurement, Trial, TrialState
from flagcore.tuner.ratios import MEMORY, Posterior, Ratios, Scales, time_scales

MAX_ROWS = 4096
"""The maximum number of open candidates (neither tried nor pruned) to evaluate, fastest predictions first. Chosen to
limit the time between two trials."""

MIN_NOISE = 0.01
"""The minimum relative noise of a step time. Chosen by hand."""

PARTIAL_NOISE = 0.05
"""The minimum relative noise of a trial that was stopped early, because its first steps are less representative. Chosen
by hand."""

FIRST_STEP_NOISE, UNFINISHED_NOISE = 0.3, 0.15
"""The relative noise of the step time of a trial that ended before it was measured: with one finished step, and with
more. Chosen by hand."""

PROBE_NOISE = 0.05
"""The minimum relative noise of a probe: its communication is modelled, and no other rank runs meanwhile. Chosen by
hand."""

MEMORY_NOISE = 0.01
"""The minimum relative noise of memory in use. Chosen by hand."""

FIGURE_NOISE = 0.1
"""The relative noise of a latency. Chosen as a typical difference between runs of a load: the slowest of a hundred
requests varies by this much."""

MIN_EXCESS, MAX_EXCESS = 0.02, 0.5
"""Logarithms of memory ratios. A trial that runs out of memory is assumed to need MIN_EXCESS more than the capacity,
but at most MAX_EXCESS more than predicted. A failure with a larger excess has another cause. Chosen by hand."""


def observed_times(context: SearchContext) -> Observations:
    """Return the ratios of measured to predicted step times for the trials of the search.

    A trial that ended before it was measured is included, with more noise, if it finished steps. If it timed out
    without a step, its duration gives a lower bound. The ratio is then the bound, or the expected ratio if that is
    larger. If the bound is much larger than expected, the trial is assumed to have hung, and is ignored. Other failed
    trials are ignored, too.
    """
    probes = {probe.number for probe in context.probes}
    timed_trials = [(trial, row, measured) for trial, row in trial_rows(context) if (measured := _timed(trial))]
    spreads = [_spread(measured) for trial, _, measured in timed_trials if trial.state is TrialState.MEASURED]
    min_spread = median(spreads or [0.0])
    values, predicted = [], predicted_times(context)
    for trial, row, measured in timed_trials:
        # programs on the same cores may slow a trial down by any factor: a large one is not credible
        excess = abs(math.log(measured.step_time_s / predicted[row]))
        disturbance = share_of_others(measured.telemetry) * (1.0 + excess)
        least = PROBE_NOISE if trial.number in probes else MIN_NOISE
        values.append((row, measured.step_time_s, max(least, disturbance, _noise(trial, measured, min_spread))))
    for trial, row in trial_rows(context):
        if trial.has_only_finished_steps:
            steps = trial.finished_steps_s
            noise = UNFINISHED_NOISE if len(steps) > 1 else FIRST_STEP_NOISE
            values.append((row, median(steps[1:] or steps), noise))
    observations = _observed(context, values, predicted)
    return Observations.join((observations, _time_bounds(context, observations)))


def _time_bounds(context: SearchContext, known: Observations) -> Observations:
    """Return lower bounds of the ratios for runs that timed out without a step.

    Probes are excluded, because they run only some micro-batches of a step.
    """
    control, overhead = context.task.spec.control, overhead_seconds(context)
    bounds_s = []
    for trial, row in trial_rows(context):
        timed_out = trial.state is TrialState.TIMED_OUT and not trial.has_only_finished_steps
        if timed_out and trial.fidelity == RUN and trial.duration_s > overhead:
            bounds_s.append(((trial.duration_s - overhead) * trial.scale / control.train_iters, row))
    if not bounds_s:
        return Observations.empty()
    rows = np.array([row for _, row in bounds_s], dtype=np.int64)
    bound = np.log([seconds for seconds, _ in bounds_s]) - np.log(predicted_times(context)[rows])
    expected = _expected_times(context, known, rows)
    is_plausible = bound < expected + MAX_EXCESS
    ratio = np.maximum(expected, bound)[is_plausible]
    return _observations(context, rows[is_plausible], ratio, np.full(ratio.size, PARTIAL_NOISE))


def fastest_open_rows(context: SearchContext) -> IntArray:
    """Return the rows with the fastest predictions among those that can be tried, at most MAX_ROWS."""
    rows = context.open_rows
    if rows.size <= MAX_ROWS:
        return rows
    return np.asarray(np.sort(rows[np.argpartition(predicted_times(context)[rows], MAX_ROWS)[:MAX_ROWS]]))


def expected_step_times(context: SearchContext, rows: IntArray) -> FloatArray:
    """Return the predicted step time of each candidate in `rows`, corrected by all trials so far, in seconds."""
    ratio = _expected_times(context, observed_times(context), rows)
    return np.asarray(predicted_times(context)[rows] * np.exp(ratio))


def expected_times(context: SearchContext, known: Observations) -> Observations:
    """Return the expected ratios of the pending trials, given `known`, as if these trials had been measured.

    This allows choosing several trials one after the other ("kriging believer"; Ginsbourger et al. 2010).
    """
    rows = np.array([context.space.find(trial.candidate) for trial in context.pending], dtype=np.int64)
    if not rows.size:
        return Observations.empty()
    return _observations(context, rows, _expected_times(context, known, rows), np.full(rows.size, MIN_NOISE))


def overhead_seconds(context: SearchContext) -> float:
    """Return the median time in seconds that measured trials spend outside their steps, or 0 before the first trial."""
    return max(median(overheads(context.task.spec.control, context.trials) or [0.0]), 0.0)


def observed_memory(context: SearchContext) -> Observations:
    """Return the ratios of measured to predicted memory in use for the trials of the search.

    If a trial ran out of memory, the capacity gives a lower bound. The ratio is then slightly above the bound, or the
    expected ratio if that is larger.
    """
    predicted, share = context.predictions.device_used_bytes, context.predictions.share_in_use
    figures = [
        (row, float(measured.device_used_bytes), MEMORY_NOISE)
        for trial, row in trial_rows(context)
        if trial.state is TrialState.MEASURED and (measured := trial.measurement)
        if measured.device_used_bytes and not measured.partial
    ]
    observations = _observed(context, figures, predicted)
    failed = [row for trial, row in trial_rows(context) if trial.state is TrialState.OUT_OF_MEMORY and share[row] > 0]
    if not failed:
        return observations
    rows = np.array(failed, dtype=np.int64)
    expected = _expected_ratios(context, (context.past.memory, observations), rows, MEMORY)
    bound = np.minimum(MIN_EXCESS - np.log(share[rows]), MAX_EXCESS)
    noise = np.full(len(rows), 2 * MIN_EXCESS)
    return Observations.join((observations, _observations(context, rows, np.maximum(expected, bound), noise)))


def observed_figure(context: SearchContext, name: str) -> Observations:
    """Return the ratios of measured to predicted values of the serving metric `name` for the trials of the search."""
    predicted = context.predictions.figures[name]
    figures = [
        (row, figure, FIGURE_NOISE)
        for trial, row in trial_rows(context)
        if trial.state is TrialState.MEASURED and trial.measurement
        if (figure := trial.measurement.figures.get(name, 0.0)) > 0 and predicted[row] > 0
    ]
    return _observed(context, figures, predicted)


def _observed(
    context: SearchContext, figures: Sequence[tuple[int, float, float]], predicted: FloatArray
) -> Observations:
    """Return the ratios to `predicted`. `figures`: the row, the measured value and the relative noise of each trial."""
    rows = np.array([row for row, _, _ in figures], dtype=np.int64)
    ratio = np.log(np.array([value for _, value, _ in figures], dtype=np.float64)) - np.log(predicted[rows])
    return _observations(context, rows, ratio, np.array([noise for _, _, noise in figures]))


def predicted_times(context: SearchContext) -> FloatArray:
    """Return each candidate's predicted step time in seconds; if unknown, their median or one second."""
    step = context.predictions.step_time_s
    is_known = np.isfinite(step)
    return np.where(is_known, step, np.median(step[is_known])) if is_known.any() else np.ones_like(step)


def _expected_times(context: SearchContext, known: Observations, rows: IntArray) -> FloatArray:
    """Return the expected log ratio of the step time of each candidate in `rows`, given `known` observations."""
    return _expected_ratios(context, (context.past.time, known), rows, time_scales(context.predictions))


def _expected_ratios(
    context: SearchContext, known: Sequence[Observations], rows: IntArray, scales: Scales
) -> FloatArray:
    features = context.features(rows)
    return Ratios(Observations.join(known), features, scales).posterior(features).mean


def trial_rows(context: SearchContext) -> Sequence[tuple[Trial, int]]:
    """Return each trial with its row in the space, and each probe of a candidate that has not run."""
    candidates_with_runs = {trial.candidate for trial in context.trials if trial.state is not TrialState.INTERRUPTED}
    trials = (*context.trials, *(probe for probe in context.probes if probe.candidate not in candidates_with_runs))
    return [(trial, row) for trial in trials if (row := context.space.find(trial.candidate)) is not None]


def _timed(trial: Trial) -> Measurement | None:
    """Return the measurement of a trial if it has a known step time, else None."""
    measured = trial.measurement if trial.state in TIMED_STATES else None
    return measured if measured and 0 < measured.step_time_s < math.inf else None


def _observations(context: SearchContext, rows: IntArray, ratio: FloatArray, noise: FloatArray) -> Observations:
    if not rows.size:
        return Observations.empty()
    return Observations(context.features(rows), ratio, noise, np.zeros(rows.size, dtype=np.int64))


def _spread(measured: Measurement) -> float:
    """Return the interquartile range of a trial's step times, relative to their median."""
    return measured.spread_s / measured.step_time_s


def _noise(trial: Trial, measured: Measurement, least: float) -> float:
    """Return the relative noise of a trial's step time.

    `least`: the median spread of the run's trials. It is the minimum of the spread, because few steps give a poor
    estimate.
    """
    spread = max(_spread(measured), least) / math.sqrt(max(len(measured.step_times_s), 1))
    return max(PARTIAL_NOISE if measured.partial else MIN_NOISE, spread, trial.interval)


def full_trial_seconds(context: SearchContext, log_time: FloatArray) -> FloatArray:
    """Return the duration of complete trials in seconds: their overhead and their steps.

    `log_time`: logarithms of step times in seconds. All probes are assumed to take the same time, because they run few
    micro-batches. Their duration is one second before the first probe.
    """
    if context.task.spec.control.fidelity == PROBE:
        return np.full_like(log_time, _median_duration(context, (TrialState.MEASURED,)) or 1.0)
    control = context.task.spec.control
    step = np.minimum(np.exp(log_time), control.max_step_time or math.inf)  # longer steps are shortened
    return np.asarray(overhead_seconds(context) + control.train_iters * step)


def expected_seconds(
    context: SearchContext, log_time: FloatArray, full: FloatArray, fits: FloatArray, success: FloatArray
) -> FloatArray:
    """Return the expected duration of trials in seconds.

    A failed trial takes the median time of earlier trials that failed in the same way. Before the first such trial, it
    takes the overhead and one step.

    - `log_time`: logarithms of step times in seconds.
    - `full`: durations of complete trials.
    - `fits`: probabilities that trials fit.
    - `success`: probabilities that they succeed if they fit.
    """
    is_probe = context.task.spec.control.fidelity == PROBE
    one_step = full if is_probe else overhead_seconds(context) + np.exp(log_time)
    out_of_memory = _median_duration(context, (TrialState.OUT_OF_MEMORY,)) or one_step
    failed = _median_duration(context, FAILED_STATES) or one_step
    return np.asarray(fits * (success * full + (1.0 - success) * failed) + (1.0 - fits) * out_of_memory)


def _median_duration(context: SearchContext, states: Collection[TrialState]) -> float | None:
    """Return the median duration of the trials in one of `states`, in seconds, or None if there are none."""
    return median([trial.duration_s for trial in context.trials if trial.state in states] or [0.0]) or None


PRIOR_FAILURES, PRIOR_SUCCESSES = 0.001, 0.2
"""The beta prior of the probability that a knob's value makes a trial fail, as numbers of failed and successful trials.
Chosen by hand: half a percent of trials fail per value, and one failure outweighs the prior."""

ITERATIONS = 50
"""The number of iterations of expectation-maximization. Chosen by hand: the estimates converge."""


def success_probability(context: SearchContext, rows: IntArray) -> FloatArray:
    """Return the probability that a trial of each row does not fail for a reason other than memory.

    Each knob value, and a cause common to all trials, can make a trial fail independently (noisy-OR; Pearl 1988).
    Expectation-maximization with a beta prior estimates their probabilities: failures are attributed to values without
    successful trials. Before the first failure, all probabilities are 1.
    """
    failed_rows, success_rows = (
        np.array([row for trial, row in trial_rows(context) if trial.state in states], dtype=np.int64)
        for states in (FAILED_STATES, TIMED_STATES)
    )
    if not failed_rows.size:
        return np.ones(rows.size)
    values, count = _value_indices(context, np.concatenate((failed_rows, success_rows, rows)))
    failed, successful, queried = np.split(values, (failed_rows.size, failed_rows.size + success_rows.size))
    trials = np.bincount(np.concatenate((failed, successful)).ravel(), minlength=count)
    failure = np.full(count, PRIOR_FAILURES / (PRIOR_FAILURES + PRIOR_SUCCESSES))
    for _ in range(ITERATIONS):
        share = failure[failed] / (1.0 - np.prod(1.0 - failure[failed], axis=1, keepdims=True))
        failures = PRIOR_FAILURES + np.bincount(failed.ravel(), share.ravel(), count)
        failure = failures / (PRIOR_FAILURES + PRIOR_SUCCESSES + trials)
    return np.asarray(np.prod(1.0 - failure[queried], axis=1))


def _value_indices(context: SearchContext, rows: IntArray) -> tuple[IntArray, int]:
    """Return an index for each knob value of each row, and the number of different indices.

    The first column is the common cause, which has the same index in all rows. The others are the knobs that vary.
    """
    indices, count = [np.zeros(rows.size, dtype=np.int64)], 1
    for column in context.space.columns(rows).values():
        codes, index = np.unique(column, return_inverse=True)
        if codes.size > 1:
            indices.append(index + count)
            count += codes.size
    return np.stack(indices, axis=1), count


MIN_FIGURE = 1e-9
"""The lower bound of predicted figures, in seconds. Chosen to keep logarithms finite."""


def feasibility_probability(context: SearchContext, rows: IntArray, features: Features) -> FloatArray:
    """Return the probability that each row meets all limits. The limits are assumed to be independent.

    `features` are the features of `rows`. The error of a figure is learned like the error of the step time. Figures
    without a prediction are ignored.
    """
    probability = np.ones(rows.size)
    for name, limit in context.task.spec.work.slo.items():
        predicted = context.predictions.figures.get(name)
        if predicted is None:
            continue
        ratio = Ratios(observed_figure(context, name), features, time_scales(context.predictions)).posterior(features)
        margin = math.log(limit) - np.log(np.maximum(predicted[rows], MIN_FIGURE)) - ratio.mean
        probability *= np.nan_to_num(scipy.special.ndtr(margin / np.maximum(ratio.deviation, 1e-6)), nan=1.0)
    return probability


def expected_gain(log_predicted: FloatArray, ratio: Posterior, best: float) -> FloatArray:
    """Return the expected improvement of each candidate over `best`, as a logarithm of time (Jones et al. 1998).

    `log_predicted` and `best` are logarithms of seconds. `ratio` is the posterior of the log ratio of measured to
    predicted.
    """
    spread = np.maximum(ratio.deviations, 1e-9)
    z = (best - log_predicted - ratio.means) / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return np.asarray(ratio.probabilities @ (spread * (z * scipy.special.ndtr(z) + density)))


QUANTILE_95 = 1.6448536269514722
"""The 95% quantile of the standard normal distribution."""


def min_memory_share(ratios: Sequence[float]) -> float:
    """Return the 95% lower bound of a candidate's memory, as a share of its predicted memory.

    `ratios`: log(measured / predicted) of memory, one per measured trial. They are assumed to be normal with the
    variances of `MEMORY`. The result is 1 if there are no trials.
    """
    if not ratios:
        return 1.0
    common, own = MEMORY.chip**2 + MEMORY.task**2, MEMORY.size**2 + MEMORY.own**2
    weight = common / (len(ratios) * common + own)
    return math.exp(weight * sum(ratios) - QUANTILE_95 * math.sqrt(weight * own + own))


def overheads(control: Control, trials: Iterable[Trial]) -> list[float]:
    """Return the seconds that each trial spent outside its steps, mostly for its start.

    Trials for which these seconds are unknown are skipped.
    """
    overheads_s = (trial.overhead_s(control.train_iters, control.warmup_iters) for trial in trials)
    return [seconds for seconds in overheads_s if seconds is not None]
