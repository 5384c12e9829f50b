"""Serving engines behind one workload: knobs, launch, load, measurements and predictions."""
