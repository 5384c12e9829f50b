"""Growth of the step time with the number of nodes: the prediction, corrected by candidates that ran on several
numbers.

Between n and N nodes the time of a step grows by the factor 1 + k g + u log2(N / n): g is the predicted growth, k the
factor of the real growth, and u the growth per doubling that the model does not include (jitter, slow nodes). k and u
have a normal prior; pairs of runs of one candidate on different numbers of nodes update it (Bayesian linear
regression). If the pairs scatter by more than their noise, a larger noise is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flagcore.domain.candidate import Candidate
from flagcore.domain.space import FloatArray
from flagcore.domain.trial import Measurement, Trial, TrialState

QUANTILE = 1.2816
"""Standard deviations to each side of an 80% interval."""
MIN_RUN_NOISE = 0.02
"""Minimum standard deviation of step times between runs, as a share."""
MIN_SCALE = 0.1


@dataclass(frozen=True, slots=True)
class Growth:
    """The distribution of k and u: its mean and covariance."""

    mean: FloatArray
    covariance: FloatArray


PRIOR = Growth(np.array([1.0, 0.0]), np.diag([0.6**2, 0.02**2]))
"""k is between 0.2 and 1.8 in 80% of cases: published predictions of exposed communication are that far off."""


class Scale(NamedTuple):
    """The factor from a step on some nodes to one on more nodes, its 80% interval, and `own`, the half width of the
    interval that the candidate does not share with others.
    """

    factor: float
    low: float
    high: float
    own: float


def scale_of(growth: Growth, predicted: float, nodes: int, of_nodes: int) -> Scale:
    """Return the factor from a step on `nodes` nodes to one on `of_nodes` nodes; `predicted` is the predicted factor.

    Growth that the model does not include is the same for all candidates, so it does not change their order.
    """
    x = np.array([predicted - 1.0, math.log2(of_nodes / nodes)])
    factor = 1.0 + float(x @ growth.mean)
    spread = QUANTILE * math.sqrt(float(x @ growth.covariance @ x))
    low, middle, high = (max(each, MIN_SCALE) for each in (factor - spread, factor, factor + spread))
    model_error = QUANTILE * abs(predicted - 1.0) * math.sqrt(float(growth.covariance[0, 0])) / middle
    return Scale(middle, low, high, model_error)


def calibrated(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return trials whose scaled step times are corrected by candidates that ran on several numbers of nodes."""
    growth = _learned(trials)
    return tuple(trials) if growth is None else tuple(_scaled(trial, growth) for trial in trials)


class _Run(NamedTuple):
    """A run on some nodes: its measured step time, and the predicted factor to a step on all nodes."""

    nodes: int
    step_s: float
    scale: float
    noise: float


def _learned(trials: Sequence[Trial]) -> Growth | None:
    """Return the growth learned from all pairs of runs; None without a pair."""
    by_candidate: dict[Candidate, list[_Run]] = {}
    of_nodes = next((trial.shortened.of_nodes for trial in trials if trial.shortened), 0)
    for trial in trials:
        if of_nodes and trial.state is TrialState.MEASURED and trial.measurement and not trial.inconclusive:
            by_candidate.setdefault(trial.candidate, []).append(_run(trial, trial.measurement, of_nodes))
    pairs = [pair for runs in by_candidate.values() for pair in _pairs(sorted(runs))]
    if not pairs:
        return None
    x, y, noise = (np.array(each) for each in zip(*pairs, strict=True))
    found = _posterior(x, y, noise)
    scatter = float(np.sqrt(np.mean(((y - x @ found.mean) / noise) ** 2)))
    return _posterior(x, y, noise * max(1.0, scatter))


def _posterior(x: FloatArray, y: FloatArray, noise: FloatArray) -> Growth:
    precision, weighted = np.linalg.inv(PRIOR.covariance), x.T / noise**2
    covariance = np.linalg.inv(precision + weighted @ x)
    return Growth(covariance @ (precision @ PRIOR.mean + weighted @ y), covariance)


def _run(trial: Trial, measured: Measurement, of_nodes: int) -> _Run:
    deviation = measured.spread_s / measured.step_time_s / 1.35  # the quartiles of a normal distribution
    noise = max(MIN_RUN_NOISE, deviation)
    short = trial.shortened
    nodes, scale = (short.nodes, short.scale) if short else (of_nodes, 1.0)
    return _Run(nodes, measured.scaled_from or measured.step_time_s, scale, noise)


def _pairs(runs: Sequence[_Run]) -> Iterator[tuple[list[float], float, float]]:
    """Yield the predicted growth, the measured growth and its noise, from the run on the fewest nodes to each other
    run.
    """
    first, *others = runs
    for run in others:
        if run.nodes > first.nodes:
            predicted = [first.scale / run.scale - 1.0, math.log2(run.nodes / first.nodes)]
            yield predicted, run.step_s / first.step_s - 1.0, math.hypot(first.noise, run.noise)


def _scaled(trial: Trial, growth: Growth) -> Trial:
    """Return a trial with its measurement scaled by `growth` instead of the prediction."""
    short, measured = trial.shortened, trial.measurement
    if not (short and short.nodes and measured and measured.scaled_from):
        return trial
    scale, low, high, model_error = scale_of(growth, short.scale, short.nodes, short.of_nodes)
    step = measured.scaled_from
    times = step * scale / measured.step_time_s
    return replace(
        trial,
        shortened=replace(short, own=model_error),
        measurement=replace(
            measured,
            step_times_s=tuple(each * times for each in measured.step_times_s),
            step_time_s=measured.step_time_s * times,
            spread_s=measured.spread_s * times,
            tokens_per_second_per_device=measured.tokens_per_second_per_device / times,
            modelled_s=step * (scale - 1.0),
            low_s=step * low,
            high_s=step * high,
        ),
    )
