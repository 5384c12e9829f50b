"""Operator libraries: which implementation of each operator runs, measured and tuned."""
