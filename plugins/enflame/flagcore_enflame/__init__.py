"""Enflame GCUs as a flagcore plugin."""
