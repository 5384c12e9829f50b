"""Tunes a spec, exports the best configuration and starts it."""
