"""Kunlunxin XPUs as a flagcore plugin."""
