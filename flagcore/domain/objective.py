"""Objectives of the search, and the Pareto front of two of them. The search minimizes seconds; reports convert them."""

from __future__ import annotations

import numpy as np

from flagcore.domain.serving import LATENCIES, RATES, STATISTICS
from flagcore.domain.space import FloatArray, IntArray
from flagcore.domain.trial import Measurement

TOKENS_PER_SECOND_PER_DEVICE = "tokens_per_second_per_device"
COST = "cost"
CHEAPEST = {"train": TOKENS_PER_SECOND_PER_DEVICE, "serve": "output_tokens_per_s_per_device"}
"""What COST stands for in a spec, by kind of job: all devices in use are paid, so the most tokens per device are the
cheapest. Training uses all devices of the spec, a server those of its instances."""
SERVING = (*RATES, *LATENCIES, *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS))
"""The objectives of serving. A latency without a statistic means its mean."""


def is_rate(objective: str) -> bool:
    """Return whether the objective is a rate, for which higher is better."""
    return objective in RATES or objective == TOKENS_PER_SECOND_PER_DEVICE


def figure_name(objective: str) -> str:
    """Return the key of `Measurement.figures` for a serving objective."""
    return f"{objective}.mean" if objective in LATENCIES else objective


def seconds(objective: str, figure: float) -> float:
    """Convert a figure of a serving objective to seconds: a latency, or the seconds per unit of a rate."""
    if not is_rate(objective):
        return figure
    return 1.0 / figure if figure > 0 else float("inf")


def objective_value(objective: str, seconds: float, measured: Measurement | None = None) -> float:
    """Convert `seconds` to the unit of the objective. For training, the rate is scaled from that of `measured`."""
    if objective == TOKENS_PER_SECOND_PER_DEVICE:
        assert measured is not None
        return measured.tokens_per_second_per_device * measured.step_time_s / seconds
    return 1.0 / seconds if is_rate(objective) else seconds


def pareto(first: FloatArray, second: FloatArray) -> IntArray:
    """Return the indices of the points for which no other has a higher `first` and a higher `second`, by descending
    `first`. Points with NaN are not among them.
    """
    order = np.lexsort((-second, -first))
    order = order[~np.isnan(first[order]) & ~np.isnan(second[order])]
    best_before = np.maximum.accumulate(np.concatenate(([-np.inf], second[order])))[:-1]
    return order[second[order] > best_before].astype(np.int64)
