"""Formulas for pipeline schedules: the time of a step, and the micro-batches in flight."""
