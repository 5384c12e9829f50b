"""Predicts memory, latencies and rates of a serving engine, for many candidates at once."""
