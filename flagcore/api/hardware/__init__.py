"""Devices, chips and calibrations of this machine."""
