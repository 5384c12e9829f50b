"""Learns the ratio of measured to predicted figures and its uncertainty."""
