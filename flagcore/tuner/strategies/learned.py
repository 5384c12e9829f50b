"""Bayesian search. It maximizes the expected gain per expected cost, and stops when no gain is likely."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import scipy
from threadpoolctl import threadpool_limits

from flagcore.contracts import Choice, SearchContext, Strategy
from flagcore.domain.prediction import Features, Observations
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import TrialState
from flagcore.i18n import Message
from flagcore.tuner.learning.ratios import MEMORY, QUANTILE_90, Posterior, Ratios, time_scales
from flagcore.tuner.learning.trials import (
    SUCCESS_STATES,
    expected_gain,
    expected_seconds,
    expected_times,
    fastest_open_rows,
    feasibility_probability,
    full_trial_seconds,
    improvement_probability,
    observed_memory,
    observed_times,
    predicted_times,
    success_probability,
    trial_rows,
)

JOINT_ROWS = 256
"""The maximum number of candidates whose joint distribution decides whether the search stops. Those with the highest
expected gain are used. Chosen to limit the time between two trials."""

SAMPLES = 2000
"""The number of samples of the joint distribution. Chosen by hand: the standard error of a probability of 5% is half a
percent."""

MIN_GAIN, MIN_PROBABILITY = 0.01, 0.05
"""The search stops when the probability that an open candidate is faster than the best by MIN_GAIN is below
MIN_PROBABILITY. Chosen, and tested on synthetic step times."""

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


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The estimates for the evaluated candidates, with one element per candidate.

    - `log_predicted`, `log_time`: logarithms of the predicted and the expected step time in seconds.
    - `fits`: probability that a trial fits.
    - `success`: probability that it succeeds if it fits.
    - `feasible`: probability that it meets the limits if it succeeds.
    - `full_s`: seconds of a trial that succeeds.
    - `cost_s`: expected seconds of a trial.
    """

    rows: IntArray
    features: Features
    ratios: Ratios
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
        measurements = [trial.measurement for trial in trials if trial.measurement]
        feasible_times = [measurement.step_time_s for measurement in measurements if not measurement.broken]
        if not feasible_times:
            likely = evaluation.fits * evaluation.success * evaluation.feasible
            if len(measurements) >= MIN_MEASURED and likely.max() < MIN_PROBABILITY:
                message = Message(
                    "no untried candidate meets the limits with a probability above {chance:.1%}", chance=likely.max()
                )
                return Choice(row=None, because=message)
            index = int(np.argmax(np.log(likely + 1e-12) - evaluation.log_time))
            reason = "no measured candidate is within the limits" if measurements else "no candidate is measured yet"
            return _choice(evaluation, index, f"{reason}: the fastest predicted candidate that is likely to fit")
        best = math.log(min(feasible_times))
        gain = evaluation.fits * evaluation.success * evaluation.feasible
        gain = gain * expected_gain(evaluation.log_predicted, evaluation.posterior, best)
        is_finished, message = _is_finished(context, evaluation, gain, best)
        if is_finished:
            return Choice(row=None, because=message)
        seconds_left = context.seconds_left
        is_possible = np.ones(gain.shape) if seconds_left is None else evaluation.full_s < seconds_left
        if not is_possible.any():
            text = Message("no trial fits in the remaining {left:.0f} s; {why}", left=seconds_left, why=message)
            return Choice(row=None, because=text)
        index = int(np.argmax(is_possible * gain / evaluation.cost_s))
        return _choice(evaluation, index, f"an expected gain of {gain[index]:.1%}; {message}")


def _evaluate(context: SearchContext) -> _Evaluation:
    """Evaluate the open candidates with the fastest predictions: their expected times, probabilities and costs."""
    predicted, rows = predicted_times(context), fastest_open_rows(context)
    features = context.features(rows)
    observed = observed_times(context)
    observations = Observations.join((context.past.time, observed, expected_times(context, observed)))
    ratios = Ratios(observations, features, time_scales(context.predictions))
    posterior = ratios.posterior(features)
    log_predicted = np.log(predicted[rows])
    log_time = log_predicted + posterior.mean
    fits, success = _fit_probability(context, rows, features), success_probability(context, rows)
    full_s = full_trial_seconds(context, log_time)
    cost_s = expected_seconds(context, log_time, full_s, fits, success)
    feasible = feasibility_probability(context, rows, features)
    return _Evaluation(
        rows, features, ratios, log_predicted, posterior, log_time, fits, success, feasible, full_s, cost_s
    )


def _fit_probability(context: SearchContext, rows: IntArray, features: Features) -> FloatArray:
    """Return the probability that each row fits into memory. It is 1 if the capacity is unknown."""
    share = context.predictions.share_in_use[rows]
    if np.isnan(share).all():
        return np.ones(rows.size)
    observed = Observations.join((context.past.memory, observed_memory(context)))
    posterior = Ratios(observed, features, MEMORY).posterior(features)
    margin = -np.log(share) - posterior.mean
    deviation = np.maximum(posterior.deviation, 1e-6)
    probability: FloatArray = np.nan_to_num(scipy.special.ndtr(margin / deviation), nan=1.0)
    return probability


def _is_finished(
    context: SearchContext, evaluation: _Evaluation, gain: FloatArray, best: float
) -> tuple[bool, Message]:
    """Return whether the search ends, and a message about the remaining gain.

    If the spec gives a number of planned steps, the search ends when no trial saves more time than it takes. Otherwise,
    it ends when a gain is improbable.
    """
    probability, max_gain = _remaining_gain(evaluation, gain, best)
    message = Message(
        "the chance that an untried candidate is more than {least:.0%} faster than the best is {chance:.1%}; "
        "it could be {most:.1%} faster at most (95%)",
        least=MIN_GAIN,
        chance=probability,
        most=max_gain,
    )
    steps = context.task.spec.control.planned_steps
    if steps is None:
        if probability >= MIN_PROBABILITY:
            return False, message
        successful = sum(trial.state in SUCCESS_STATES for trial in context.trials)
        return successful >= MIN_MEASURED or (
            successful >= MIN_CONFIRMED and _confirms(context, evaluation, best)
        ), message
    if (gain * math.exp(best) * steps > evaluation.cost_s).any():
        return False, message
    return True, Message(
        "no trial is expected to save more time in {steps:,} steps than it takes; {why}", steps=steps, why=message
    )


def _confirms(context: SearchContext, evaluation: _Evaluation, best: float) -> bool:
    """Return whether earlier runs predicted all measurements, and no unmeasured part of a step could hide a gain."""
    observed, parts = observed_times(context), context.predictions.time_s
    if len(context.past.time) == 0 or len(observed) == 0 or len(parts) < 2:
        return False
    expected = Ratios(context.past.time, observed.features, time_scales(context.predictions)).posterior(
        observed.features
    )
    deviation = np.hypot(expected.deviation, observed.noise)
    if (np.abs(observed.log_ratio - expected.mean) > MAX_DEVIATIONS * deviation).any():
        return False
    measured = np.array([row for trial, row in trial_rows(context) if trial.measurement], dtype=np.int64)
    shares = np.array(list(parts.values())) / np.sum(list(parts.values()), axis=0)
    share = shares[:, evaluation.rows]
    is_unmeasured = share > MIN_SHARE_RATIO * shares[:, measured].max(axis=1, keepdims=True)
    shortest = evaluation.log_time + np.log1p(-MAX_PART_ERROR * np.where(is_unmeasured, share, 0.0))
    is_faster = shortest < best + math.log1p(-MIN_GAIN)
    return not (is_faster & (evaluation.fits > MIN_PROBABILITY)).any()


def _remaining_gain(evaluation: _Evaluation, gain: FloatArray, best: float) -> tuple[float, float]:
    """Return the probability that an open candidate gains more than MIN_GAIN, and the 95% bound of the gain."""
    top = np.argsort(-gain, kind="stable")[:JOINT_ROWS]
    samples = evaluation.log_predicted[top] + evaluation.ratios.sample(evaluation.features.take(top), SAMPLES)
    return improvement_probability(
        samples, evaluation.fits[top] * evaluation.feasible[top], evaluation.success[top], best, MIN_GAIN
    )


def believed(context: SearchContext, row: int) -> Mapping[str, object]:
    """Return the corrected prediction of the candidate in `row`: its step time, and its probability of fitting."""
    return _belief(_evaluate(replace(context, open_rows=np.array([row], dtype=np.int64))), 0)


def _choice(evaluation: _Evaluation, index: int, because: str) -> Choice:
    return Choice(row=int(evaluation.rows[index]), because=because, belief=_belief(evaluation, index))


def _belief(evaluation: _Evaluation, index: int) -> Mapping[str, object]:
    center, spread = evaluation.log_time[index], QUANTILE_90 * evaluation.posterior.deviation[index]
    step = {"value": math.exp(center), "low": math.exp(center - spread), "high": math.exp(center + spread)}
    return {"step_time_s": step, "chance_to_fit": float(evaluation.fits[index])}


STRATEGY: Strategy = Learned()
