"""What measurements say of predictions: the ratio between them, with its uncertainty."""

from flagcore.learning.features import features
from flagcore.learning.gain import chance_to_gain, expected_gain
from flagcore.learning.ratios import MEMORY, TIME, Ratios

__all__ = [
    "MEMORY",
    "TIME",
    "Ratios",
    "chance_to_gain",
    "expected_gain",
    "features",
]
