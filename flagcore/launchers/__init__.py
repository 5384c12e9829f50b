"""Launchers start, await and end trials."""
