"""Tune a spec, export the best configuration and start it."""
