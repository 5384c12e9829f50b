"""Bayesian search. It maximizes the expected gain per expected cost, and stops when no gain is likely."""

import math
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
import scipy
from threadpoolctl import threadpool_limits

from flagcore.contracts import Choice, SearchContext, Strategy
from flagcore.domain.features import Features, Observations
from flagcore.domain.prediction import Belief
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import TIMED_STATES, Role, Trial, TrialState
from flagcore.i18n import Message
from flagcore.tuner import learning
from flagcore.tuner.ratios import MEMORY, QUANTILE_90, Posterior, Ratios, time_scales
from flagcore.tuner.search_state import MIN_NOISE, indifference, noise

TRIALS_PER_DEVIATION = 95
"""The search stops when the largest expected gain is below the indifference times a share, 1 at most: the measurements
over this number times the median deviation of open candidates. The best of many uncertain ones may be better than the
largest expected gain of one. Chosen on 15 of vTrain's sweeps and made-up ones (benchmarks/LOG.md)."""

MIN_FOR_NOISE = 7
"""From this number of measurements on, the indifference is at least their median noise, and its share is larger by its
ratio to MIN_NOISE: more trials would hardly find a gain that noise hides. The noise of fewer measurements is too
uncertain. Chosen on nine recorded tunes and replayed ones (benchmarks/LOG.md)."""

MIN_SCORE = 0.5
"""The least score, relative to the highest, of a candidate that is preferred because it is simpler. Chosen by hand."""

MIN_GAIN = 0.01
"""Measurements confirm earlier runs only if no open candidate could be faster than the best by this share. Chosen by
hand."""

MIN_PROBABILITY = 0.05
"""A candidate that meets the limits, or fits, with a smaller probability is not worth a trial. Chosen by hand."""

MIN_MEASURED = 3
"""The minimum number of measurements before the search may stop, because earlier runs may not be comparable. Chosen by
hand."""

MIN_CONFIRMED = 2
"""The same minimum if this run's measurements confirm the earlier runs. Chosen on 48 published sweeps (vTrain, 2 and 4
devices)."""

MAX_DEVIATIONS = 2.0
"""A measurement confirms earlier runs if it is within this number of standard deviations of their prediction. Chosen by
hand: 95% of a normal distribution."""

MIN_SHARE_RATIO, MAX_PART_ERROR = 4.0, 0.5
"""A part of an open candidate's step counts as not measured if its share of the step is more than MIN_SHARE_RATIO times
its share in every measured candidate. Such a part may be shorter than predicted by the share MAX_PART_ERROR. Chosen by
hand: with two thirds, the search finds the same candidates, but needs more trials."""


class _Evaluation(NamedTuple):
    """The estimates for the evaluated candidates, with one element per candidate.

    - `log_predicted`, `log_time`: logarithms of the predicted and the expected step time in seconds.
    - `fits`: probability that a trial fits.
    - `success`: probability that it succeeds if it fits.
    - `feasible`: probability that it meets the limits if it succeeds.
    - `full_s`: seconds of a trial that succeeds.
    - `cost_s`: expected seconds of a trial.
    """

    rows: IntArray
    log_predicted: FloatArray
    posterior: Posterior
    log_time: FloatArray
    fits: FloatArray
    success: FloatArray
    feasible: FloatArray
    full_s: FloatArray
    cost_s: FloatArray


class Learned:
    """A strategy that corrects predictions with the measurements of this run and of earlier runs on the same chip."""

    name = "learned"

    def next(self, context: SearchContext) -> Choice:
        # The matrices are small. On a busy machine, BLAS threads make operations on them up to 15 times slower.
        with threadpool_limits(limits=1, user_api="blas"):
            return self._choose(context)

    def _choose(self, context: SearchContext) -> Choice:
        """Return the candidate with the highest expected gain per expected cost, or none if no gain is likely."""
        evaluation = _evaluate(context)
        trials = [trial for trial in context.trials if trial.state is TrialState.MEASURED]
        measurements = [(trial.measurement, trial) for trial in trials if trial.measurement]
        feasible = [
            (measured.step_time_s, trial.number, trial) for measured, trial in measurements if not measured.broken
        ]
        if not feasible:
            likely = evaluation.fits * evaluation.success * evaluation.feasible
            if len(measurements) >= MIN_MEASURED and likely.max() < MIN_PROBABILITY:
                message = Message(
                    "no untried candidate meets the limits with a probability above {chance:.1%}", chance=likely.max()
                )
                return Choice(row=None, because=message)
            index = _simplest(context, evaluation, likely * np.exp(evaluation.log_time.min() - evaluation.log_time))
            reason = "no measured candidate is within the limits" if measurements else "no candidate is measured yet"
            return _choice(evaluation, index, f"{reason}: the fastest predicted candidate that is likely to fit")
        best_s, _, best_trial = min(feasible)
        best = math.log(best_s)
        gain = evaluation.fits * evaluation.success * evaluation.feasible
        gain = gain * learning.expected_gain(evaluation.log_predicted, evaluation.posterior, best)
        if because := _finished_because(context, evaluation, gain, best, best_trial):
            return Choice(row=None, because=because)
        seconds_left = context.seconds_left
        is_possible = np.ones(gain.shape) if seconds_left is None else evaluation.full_s < seconds_left
        max_gain = float(gain.max())
        if not is_possible.any():
            because = Message(
                "no trial fits in the remaining {left:.0f} s; the largest expected gain of an untried candidate is "
                "{gain:.1%}",
                left=seconds_left,
                gain=max_gain,
            )
            return Choice(row=None, because=because)
        index = _simplest(context, evaluation, is_possible * gain / evaluation.cost_s)
        choice = _choice(evaluation, index, f"an expected gain of {gain[index]:.1%}")
        return replace(choice, belief=_belief(evaluation, index, max_gain))


def _simplest(context: SearchContext, evaluation: _Evaluation, score: FloatArray) -> int:
    """Return the index of the candidate to try: the highest score or, among those that are hardly worse, the simplest.

    They have at least MIN_SCORE of the highest score, succeed as probably, and have an expected time within the
    indifference. The simplest has the fewest settings that differ from the baseline.
    """
    best = int(np.argmax(score))
    slowdown = evaluation.log_time - evaluation.log_time[best]
    chance = evaluation.fits * evaluation.success * evaluation.feasible
    is_near = (slowdown <= context.task.spec.control.indifference) & (chance >= (1.0 - MIN_GAIN) * chance[best])
    near = np.flatnonzero(is_near & (score >= MIN_SCORE * score[best]))
    rows = np.append(evaluation.rows[near], context.space.find(context.problem.baseline) or 0)
    settings = np.sum([column[:-1] != column[-1] for column in context.space.columns(rows).values()], axis=0)
    return int(near[np.lexsort((-score[near], settings))[0]])


def _evaluate(context: SearchContext) -> _Evaluation:
    """Estimate times, success probabilities and costs of the untried candidates with the fastest predictions."""
    predicted, rows = learning.predicted_times(context), learning.fastest_open_rows(context)
    features = context.features(rows)
    observed = learning.observed_times(context)
    observations = Observations.join((context.past.time, observed, learning.expected_times(context, observed)))
    posterior = Ratios(observations, features, time_scales(context.predictions)).posterior(features)
    log_predicted = np.log(predicted[rows])
    log_time = log_predicted + posterior.mean
    fits, success = _fit_probability(context, rows, features), learning.success_probability(context, rows)
    full_s = learning.full_trial_seconds(context, log_time)
    cost_s = learning.expected_seconds(context, log_time, full_s, fits, success)
    feasible = learning.feasibility_probability(context, rows, features)
    return _Evaluation(rows, log_predicted, posterior, log_time, fits, success, feasible, full_s, cost_s)


def _fit_probability(context: SearchContext, rows: IntArray, features: Features) -> FloatArray:
    """Return the probability that each row fits into memory. It is 1 if the capacity is unknown."""
    share = context.predictions.share_in_use[rows]
    if np.isnan(share).all():
        return np.ones(rows.size)
    observed = Observations.join((context.past.memory, learning.observed_memory(context)))
    posterior = Ratios(observed, features, MEMORY).posterior(features)
    margin = -np.log(share) - posterior.mean
    return np.asarray(np.nan_to_num(scipy.special.ndtr(margin / np.maximum(posterior.deviation, 1e-6)), nan=1.0))


def _finished_because(
    context: SearchContext, evaluation: _Evaluation, gain: FloatArray, best: float, best_trial: Trial
) -> Message | None:
    """Return why the search ends, or None if it continues.

    `gain`: the expected gain of each evaluated candidate. `best`: the logarithm of the step time of `best_trial`.
    The search ends if the largest expected gain is below a share of the indifference, now and before the last
    trial. The latter is not needed if the measurements confirm earlier runs. If the spec gives a number of planned
    steps, the search ends when no trial saves more time than it takes.
    """
    control, max_gain = context.task.spec.control, float(gain.max())
    if (steps := control.planned_steps) is not None:
        if (gain * math.exp(best) * steps > evaluation.cost_s).any():
            return None
        return Message(
            "no trial is expected to save more time in {steps:,} steps than it takes; "
            "the largest expected gain of an untried candidate is {gain:.1%}",
            steps=steps,
            gain=max_gain,
        )
    successful = sum(trial.state in TIMED_STATES for trial in context.trials)
    least = indifference(control, [best_trial])
    share = successful / (TRIALS_PER_DEVIATION * float(np.median(evaluation.posterior.deviation)))
    if successful >= MIN_FOR_NOISE:
        measured = (trial for trial in context.trials if trial.state is TrialState.MEASURED)
        least = max(least, median(noise([trial]) for trial in measured))
        share *= least / MIN_NOISE
    least *= min(1.0, share)
    if max_gain >= least:
        return None
    was_below_before = successful >= MIN_MEASURED and _last_max_gain(context) < least
    if not was_below_before and not (successful >= MIN_CONFIRMED and _confirms(context, evaluation, best)):
        return None
    return Message(
        "the largest expected gain of an untried candidate is {gain:.1%}, below {least:.1%}", gain=max_gain, least=least
    )


def _last_max_gain(context: SearchContext) -> float:
    """Return the largest expected gain before the last trial that a strategy chose, or infinity if it is unknown."""
    chosen = [trial for trial in context.trials if trial.role is Role.SEARCH and trial.is_conclusive]
    last = max(chosen, key=lambda trial: trial.number, default=None)
    gain = last.believed.max_expected_gain if last and last.believed else None
    return math.inf if gain is None else gain


def _confirms(context: SearchContext, evaluation: _Evaluation, best: float) -> bool:
    """Return whether earlier runs predicted all measurements, and no unmeasured part of a step could hide a gain."""
    observed, parts = learning.observed_times(context), context.predictions.time_s
    if len(context.past.time) == 0 or len(observed) == 0 or len(parts) < 2:
        return False
    expected = Ratios(context.past.time, observed.features, time_scales(context.predictions)).posterior(
        observed.features
    )
    deviation = np.hypot(expected.deviation, observed.noise)
    if (np.abs(observed.log_ratio - expected.mean) > MAX_DEVIATIONS * deviation).any():
        return False
    measured = np.array([row for trial, row in learning.trial_rows(context) if trial.measurement], dtype=np.int64)
    shares = np.array(list(parts.values())) / np.sum(list(parts.values()), axis=0)
    share = shares[:, evaluation.rows]
    is_unmeasured = share > MIN_SHARE_RATIO * shares[:, measured].max(axis=1, keepdims=True)
    shortest = evaluation.log_time + np.log1p(-MAX_PART_ERROR * np.where(is_unmeasured, share, 0.0))
    return not ((shortest < best + math.log1p(-MIN_GAIN)) & (evaluation.fits > MIN_PROBABILITY)).any()


def believed(context: SearchContext, row: int) -> Belief:
    """Return the corrected prediction of the candidate in `row`: its step time, and its probability of fitting."""
    return _belief(_evaluate(replace(context, open_rows=np.array([row], dtype=np.int64))), 0)


def _choice(evaluation: _Evaluation, index: int, because: str) -> Choice:
    return Choice(row=int(evaluation.rows[index]), because=because, belief=_belief(evaluation, index))


def _belief(evaluation: _Evaluation, index: int, max_gain: float | None = None) -> Belief:
    center, spread = evaluation.log_time[index], QUANTILE_90 * evaluation.posterior.deviation[index]
    low_s, high_s = math.exp(center - spread), math.exp(center + spread)
    fits = float(evaluation.fits[index])
    return Belief(
        step_time_s=math.exp(center), low_s=low_s, high_s=high_s, chance_to_fit=fits, max_expected_gain=max_gain
    )


STRATEGY: Strategy = Learned()
