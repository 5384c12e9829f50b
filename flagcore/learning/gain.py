"""What a trial may gain, from what is believed of it."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from flagcore.domain.space import FloatArray

SAMPLES = 2000


def expected_gain(log_time: FloatArray, deviation: FloatArray, best: float) -> FloatArray:
    """Return by how much each candidate is expected to be faster than `best`, as a share (expected improvement).

    All are logarithms of seconds (Jones et al. 1998).
    """
    spread = np.maximum(deviation, 1e-9)
    z = (best - log_time) / spread
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    gain: FloatArray = spread * (z * ndtr(z) + density)
    return gain


def chance_to_gain(
    log_time: FloatArray, covariance: FloatArray, fits: FloatArray, best: float, least: float
) -> tuple[float, float]:
    """Return the chance that any candidate fits and is faster than `best` by more than `least`, and how far it may be.

    `fits` are the chances that each fits. The second figure is the gain, as a share, that is reached with a chance
    of 5%; 0 if there is none. Sampled, always from the same numbers.
    """
    rng = np.random.default_rng(0)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    times = log_time + rng.standard_normal((SAMPLES, log_time.size)) @ root.T
    times = np.where(rng.random(times.shape) < fits, times, np.inf)
    fastest = times.min(axis=1)
    gains = np.where(np.isfinite(fastest), best - fastest, 0.0)
    return float((gains > np.log1p(least)).mean()), float(max(np.expm1(np.quantile(gains, 0.95)), 0.0))
