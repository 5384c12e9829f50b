"""Reads how an engine is started, whatever the form, and converts it to a spec."""

SDK = ("batch", "dialect", "programs", "shell", "values")
"""The modules that other distributions may import."""
