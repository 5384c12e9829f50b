"""Launchers start trials, wait for them and end them."""
