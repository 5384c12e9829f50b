"""Manages hosts, devices, calibrations, specs and runs."""
