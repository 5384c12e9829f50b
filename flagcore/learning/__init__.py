"""Learns the ratio of measured to predicted figures, with its uncertainty."""
