"""Explains why a candidate won or lost, and how two candidates differ."""
