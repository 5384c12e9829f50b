"""Specs and histories of other tools."""
