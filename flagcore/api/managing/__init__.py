"""Manage hosts, devices, calibrations, specs and runs."""
