"""Formulas for the memory of devices and the times of kernels, collectives and pipelines, in SI units."""
