"""Shared by all functions of the API: inputs, the run folder, the state of a run, warnings."""
