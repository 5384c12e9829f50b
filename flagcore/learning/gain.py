"""The expected gain of a trial."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from flagcore.domain.space import FloatArray
from flagcore.learning.ratios import Belief


def expected_gain(log_predicted: FloatArray, ratio: Belief, best: float) -> FloatArray:
    """Return by how much each candidate is expected to be faster than `best`, as a share (expected improvement).

    All are logarithms of seconds; `ratio` is what is believed of the prediction's error (Jones et al. 1998).
    """
    spread = np.maximum(ratio.deviations, 1e-9)
    z = (best - log_predicted - ratio.means) / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    gain: FloatArray = ratio.chances @ (spread * (z * ndtr(z) + density))
    return gain


def chance_to_gain(
    log_times: FloatArray, fits: FloatArray, ends: FloatArray, best: float, least: float
) -> tuple[float, float]:
    """Return the chance that any candidate works and is faster than `best` by more than `least`, and how far it may be.

    `log_times` are draws, a row each, of all candidates together. `fits` are the chances that each fits, whatever the
    others do; `ends` those that it does not fail otherwise: what fails the likeliest, fails with the less likely.
    The second figure is the gain, as a share, that is reached with a chance of 5%; 0 if there is none. Always the same
    answer.
    """
    rng = np.random.default_rng(1)
    works = (rng.random(log_times.shape) < fits) & (rng.random((len(log_times), 1)) < ends)
    fastest = np.where(works, log_times, np.inf).min(axis=1)
    gains = np.where(np.isfinite(fastest), best - fastest, 0.0)
    return float((gains > np.log1p(least)).mean()), float(max(np.expm1(np.quantile(gains, 0.95)), 0.0))
