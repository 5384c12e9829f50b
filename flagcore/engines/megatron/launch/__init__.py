"""Starts trials and reads their results. Nothing here runs inside of a trial."""
