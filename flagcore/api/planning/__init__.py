"""Predictions without trials, and probes of single ranks."""
