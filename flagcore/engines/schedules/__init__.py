"""Formulas of pipeline schedules for training engines: the time of a step, and the micro-batches in flight."""
