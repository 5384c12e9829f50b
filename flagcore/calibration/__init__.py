"""Measurements on the user's devices, which are stored between runs, and the costs that are derived from them."""

from flagcore.calibration.costs import collective_table, kernel_table
from flagcore.calibration.experience import Experience
from flagcore.calibration.store import Calibration, Calibrations

__all__ = ["Calibration", "Calibrations", "Experience", "collective_table", "kernel_table"]
