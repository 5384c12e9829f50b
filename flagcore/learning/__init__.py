"""Learns the ratio of measured to predicted figures, with its uncertainty."""

from flagcore.learning.chances import chance_to_gain, expected_gain
from flagcore.learning.prior import MEMORY, TIME
from flagcore.learning.ratios import Belief, Ratios

__all__ = [
    "MEMORY",
    "TIME",
    "Belief",
    "Ratios",
    "chance_to_gain",
    "expected_gain",
]
