"""Splits of the work of a training step over devices: layouts, pipelines and parameters."""
