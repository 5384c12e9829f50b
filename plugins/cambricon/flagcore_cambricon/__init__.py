"""Cambricon MLUs as a flagcore plugin."""
