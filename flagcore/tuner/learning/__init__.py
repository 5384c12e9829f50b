"""Learns the ratio of measured to predicted times, memory use and latencies, and how uncertain it is."""
