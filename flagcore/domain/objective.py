"""Objectives. The search minimizes seconds; figures are shown in the objective's own unit."""

from __future__ import annotations

from flagcore.domain.serving import LATENCIES, RATES, STATISTICS
from flagcore.domain.trial import Measurement

TOKENS_PER_SECOND_PER_DEVICE = "tokens_per_second_per_device"
SERVING = (*RATES, *LATENCIES, *(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS))
"""A latency without a statistic is its mean."""


def is_rate(objective: str) -> bool:
    """Return whether higher is better."""
    return objective in RATES or objective == TOKENS_PER_SECOND_PER_DEVICE


def figure_name(objective: str) -> str:
    """Return the name of the figure of a serving objective."""
    return f"{objective}.mean" if objective in LATENCIES else objective


def seconds(objective: str, figure: float) -> float:
    """Return a serving objective in seconds: per unit of a rate, or the latency itself."""
    if not is_rate(objective):
        return figure
    return 1.0 / figure if figure > 0 else float("inf")


def objective_value(objective: str, seconds: float, measured: Measurement | None = None) -> float:
    """Return the objective's figure for `seconds`; the rate of training is scaled from a measurement."""
    if objective == TOKENS_PER_SECOND_PER_DEVICE:
        assert measured is not None
        return measured.tokens_per_second_per_device * measured.step_time_s / seconds
    return 1.0 / seconds if is_rate(objective) else seconds
