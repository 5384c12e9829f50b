"""Hygon DCUs as a flagcore plugin."""
