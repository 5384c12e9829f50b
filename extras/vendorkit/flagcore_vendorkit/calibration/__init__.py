"""Calibration: kernels and collectives measured on the devices of this machine, which replace data of plugins."""
