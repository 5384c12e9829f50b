"""Launchers start a trial, wait for it and end it."""
