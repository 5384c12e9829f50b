"""What saves, failures and restarts take from a job.

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006); failures are a Poisson process. J. W. Young, Communications of the ACM 17 (1974).
"""

from collections.abc import Callable
from itertools import pairwise
from math import exp, factorial

import numpy as np

from flagcore.domain.space import FloatArray


def young_interval(hold_s: FloatArray, mtbf_s: float) -> FloatArray:
    """Return Young's interval between saves in seconds, for saves that hold the job for `hold_s`."""
    return np.sqrt(2.0 * hold_s * mtbf_s)


def best_interval(hold_s: FloatArray, mtbf_s: float) -> FloatArray:
    """Return Daly's interval of work between two saves in seconds (equation 37)."""
    root = np.sqrt(hold_s / (2.0 * mtbf_s))
    interval = 2.0 * mtbf_s * root * (1.0 + root / 3.0 + root**2 / 9.0) - hold_s
    return np.where(root >= 1.0, mtbf_s, interval)  # unknown stays unknown


def share_of_work(
    interval_s: FloatArray, hold_s: FloatArray, mtbf_s: float | None, restart_s: FloatArray
) -> FloatArray:
    """Return the share of the time in which a job makes progress (the inverse of equation 20 of Daly).

    `interval_s`: work between two saves, each of which holds the job for `hold_s`. `restart_s`: seconds from a failure
    until work goes on, plus the time that a save in the background takes, in which work is lost that was saved before.
    `mtbf_s`: seconds between failures; None without any.
    """
    if mtbf_s is None:
        return interval_s / (interval_s + hold_s)
    with np.errstate(over="ignore"):
        spent = mtbf_s * np.exp(restart_s / mtbf_s) * np.expm1((interval_s + hold_s) / mtbf_s)
    return interval_s / spent


def waiting_share(spares: int, failures_per_s: float, repair_s: float) -> float:
    """Return the share of the time in which more nodes are in repair than there are spares.

    The number in repair has a Poisson distribution, whatever the distribution of the repairs (M/G/infinity).
    """
    mean = failures_per_s * repair_s
    if mean > 700.0 or spares > 150:  # beyond the range of doubles; the distribution is narrow
        return float(mean > spares)
    return max(0.0, 1.0 - exp(-mean) * sum(mean**count / factorial(count) for count in range(spares + 1)))


def crossing(gain: Callable[[float], float], low: float, high: float) -> float | None:
    """Return the largest value between `low` and `high` at which `gain` changes its sign, or None if there is none."""
    values = np.geomspace(high, low, 200).tolist()
    for above, below in pairwise(values):
        if gain(above) <= 0.0 < gain(below) or gain(above) > 0.0 >= gain(below):
            is_up = gain(above) > 0.0
            for _step in range(40):
                middle = (above * below) ** 0.5
                above, below = (middle, below) if (gain(middle) > 0.0) == is_up else (above, middle)
            return float(above)
    return None
