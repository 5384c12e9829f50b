"""Starts and exports servers, and reads specs from their commands."""
