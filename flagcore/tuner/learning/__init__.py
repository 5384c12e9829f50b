"""Learns the ratio of measured to predicted figures, and how uncertain it is."""
