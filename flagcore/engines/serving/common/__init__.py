"""Modules that all serving engines share."""
