"""How much of the predicted memory a candidate needs at least, after what trials used."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flagcore.learning.prior import MEMORY

SURE = 1.6448536269514722
"""Standard deviations below the mean: with a chance of 95% a candidate needs more."""


def least_share(ratios: Sequence[float]) -> float:
    """Return the share of its predicted memory that any candidate is believed to need at least.

    `ratios` are logarithms of used over predicted memory of trials that ran. 1 before any: a prediction stands until
    something was measured. The ratio common to all is normal, with the variances of `MEMORY`.
    """
    if not ratios:
        return 1.0
    common, own = MEMORY.chip**2 + MEMORY.task**2, MEMORY.size**2 + MEMORY.own**2
    weight = common / (len(ratios) * common + own)
    return math.exp(weight * sum(ratios) - SURE * math.sqrt(weight * own + own))
