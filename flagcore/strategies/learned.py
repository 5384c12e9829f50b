"""Bayesian search: try the most expected gain per expected cost, and stop when no gain is likely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import scipy
from threadpoolctl import threadpool_limits

from flagcore.contracts import Choice, SearchContext, Strategy
from flagcore.domain.experience import Features, Observations
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import TrialState
from flagcore.i18n import Message
from flagcore.learning.prior import MEMORY, TIME
from flagcore.learning.probabilities import (
    ENDED,
    expected_gain,
    feasibility_probability,
    improvement_probability,
    success_probability,
)
from flagcore.learning.ratios import Belief, Ratios
from flagcore.learning.trials import (
    believed_times,
    expected_seconds,
    observed_memory,
    observed_times,
    unit_where_unknown,
    whole_seconds,
)

MAX_ROWS = 4096
"""The number of open candidates to evaluate: the fastest predicted ones."""

JOINT_ROWS = 256
"""The number of these, the most likely to gain, whose joint distribution decides whether the search stops."""

DRAWS = 2000
"""Draws from that joint distribution: the standard error of a probability of 5% is half a percent."""

LEAST_GAIN, LEAST_CHANCE = 0.01, 0.05
"""The search stops when the probability that an open candidate is faster than the best by LEAST_GAIN is below
LEAST_CHANCE."""

LEAST_MEASURED = 3
"""Least number of measurements before the search may stop, because earlier runs may not be comparable."""

TAIL = 1.2815515655446004
"""Standard deviations from the median to the bounds of an 80% interval."""


@dataclass(frozen=True, slots=True)
class _View:
    """The posterior of some open rows.

    `log_predicted` and `log_time` are logarithms of seconds, `fits` the probability to fit, `ends` to complete if it
    fits, and `keeps` to be within the limits if it completes. `whole` is the duration of a trial that completes,
    `cost` the expected duration of any trial, both in seconds.
    """

    rows: IntArray
    features: Features
    ratios: Ratios
    log_predicted: FloatArray
    ratio: Belief
    log_time: FloatArray
    fits: FloatArray
    ends: FloatArray
    keeps: FloatArray
    whole: FloatArray
    cost: FloatArray


class Learned:
    """Corrects predictions by the measurements of this run and of earlier runs on the same chip."""

    name = "learned"

    def next(self, context: SearchContext) -> Choice:
        # The matrices are small: on a busy machine, threads of BLAS make them up to 15 times slower.
        with threadpool_limits(limits=1, user_api="blas"):
            return self._choose(context)

    def _choose(self, context: SearchContext) -> Choice:
        """Return the candidate with the most expected gain per expected cost, or none if no gain is likely."""
        view = _view(context)
        trials = [trial for trial in context.trials if trial.state is TrialState.MEASURED]
        ran = [trial.measurement for trial in trials if trial.measurement]
        measured = [measurement.step_time_s for measurement in ran if not measurement.broken]
        if not measured:
            likely = view.fits * view.ends * view.keeps
            if len(ran) >= LEAST_MEASURED and likely.max() < LEAST_CHANCE:
                message = Message(
                    "no untried candidate keeps the limits with a chance of more than {chance:.1%}", chance=likely.max()
                )
                return Choice(row=None, because=message)
            place = int(np.argmax(np.log(likely + 1e-12) - view.log_time))
            nothing = "no measured candidate is within the limits" if ran else "no candidate is measured yet"
            return _choice(view, place, f"{nothing}: the fastest predicted candidate that is likely to fit")
        best = math.log(min(measured))
        gain = view.fits * view.ends * view.keeps * expected_gain(view.log_predicted, view.ratio, best)
        ends, message = _ends(context, view, gain, best)
        if ends:
            return Choice(row=None, because=message)
        possible = np.ones(gain.shape) if context.seconds_left is None else view.whole < context.seconds_left
        if not possible.any():
            text = Message("no trial fits in the remaining {left:.0f} s; {why}", left=context.seconds_left, why=message)
            return Choice(row=None, because=text)
        place = int(np.argmax(possible * gain / view.cost))
        return _choice(view, place, f"an expected gain of {gain[place]:.1%}; {message}")


def _view(context: SearchContext) -> _View:
    """Return the posterior of the open rows that are predicted to be the fastest."""
    predicted = unit_where_unknown(context)
    rows = context.open_rows
    if rows.size > MAX_ROWS:
        rows = np.sort(rows[np.argpartition(predicted[rows], MAX_ROWS)[:MAX_ROWS]])
    found = context.features(rows)
    known = observed_times(context)
    ratios = Ratios(Observations.join((context.past.time, known, believed_times(context, known))), found, TIME)
    time = ratios.of(found)
    log_predicted = np.log(predicted[rows])
    log_time = log_predicted + time.mean
    fits, ends = _fits(context, rows, found), success_probability(context, rows)
    whole = whole_seconds(context, log_time)
    cost = expected_seconds(context, log_time, whole, fits, ends)
    keeps = feasibility_probability(context, rows, found)
    return _View(rows, found, ratios, log_predicted, time, log_time, fits, ends, keeps, whole, cost)


def _fits(context: SearchContext, rows: IntArray, found: Features) -> FloatArray:
    """Return the probability that each row fits, 1 if the capacity is unknown."""
    share = context.predictions.share_in_use[rows]
    if np.isnan(share).all():
        return np.ones(rows.size)
    memory = Ratios(Observations.join((context.past.memory, observed_memory(context))), found, MEMORY).of(found)
    room = -np.log(share) - memory.mean
    chance: FloatArray = np.nan_to_num(scipy.special.ndtr(room / np.maximum(memory.deviation, 1e-6)), nan=1.0)
    return chance


def _ends(context: SearchContext, view: _View, gain: FloatArray, best: float) -> tuple[bool, Message]:
    """Return whether the search ends, and how much gain is left: by value with planned steps, by chance without."""
    chance, most = _left(view, gain, best)
    left = Message(
        "the chance that an untried candidate is more than {least:.0%} faster than the best is {chance:.1%}; "
        "it could be {most:.1%} faster at most (95%)",
        least=LEAST_GAIN,
        chance=chance,
        most=most,
    )
    steps = context.task.spec.control.planned_steps
    if steps is None:
        ended = sum(trial.state in ENDED for trial in context.trials)
        return chance < LEAST_CHANCE and ended >= LEAST_MEASURED, left
    if (gain * math.exp(best) * steps > view.cost).any():
        return False, left
    return True, Message(
        "no trial is expected to save more time in {steps:,} steps than it takes; {why}", steps=steps, why=left
    )


def _left(view: _View, gain: FloatArray, best: float) -> tuple[float, float]:
    """Return the probability that an open row gains more than LEAST_GAIN, and the 95% bound of the gain."""
    likeliest = np.argsort(-gain, kind="stable")[:JOINT_ROWS]
    drawn = view.log_predicted[likeliest] + view.ratios.drawn(view.features.take(likeliest), DRAWS)
    return improvement_probability(
        drawn, view.fits[likeliest] * view.keeps[likeliest], view.ends[likeliest], best, LEAST_GAIN
    )


def believed(context: SearchContext, row: int) -> Mapping[str, object]:
    """Return the posterior of a row, open or not: its step time and its probability to fit."""
    return _belief(_view(replace(context, open_rows=np.array([row], dtype=np.int64))), 0)


def _choice(view: _View, place: int, because: str) -> Choice:
    return Choice(row=int(view.rows[place]), because=because, belief=_belief(view, place))


def _belief(view: _View, place: int) -> Mapping[str, object]:
    middle, spread = view.log_time[place], TAIL * view.ratio.deviation[place]
    step = {"value": math.exp(middle), "low": math.exp(middle - spread), "high": math.exp(middle + spread)}
    return {"step_time_s": step, "chance_to_fit": float(view.fits[place])}


STRATEGY: Strategy = Learned()
