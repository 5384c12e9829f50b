"""Calibrations: what was measured on devices of this user, kept between runs, and the costs that it makes."""

from flagcore.calibration.costs import collective_table, kernel_table
from flagcore.calibration.store import Calibration, Calibrations

__all__ = ["Calibration", "Calibrations", "collective_table", "kernel_table"]
