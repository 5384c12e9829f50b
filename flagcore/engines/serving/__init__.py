"""Serving engines behind one workload: their knobs, how they are started, loaded and read, and what they will do."""
