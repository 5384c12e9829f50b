"""Launchers that start trials on several hosts with an agent on each: `ssh`, `slurm`, and the base class of others."""

SDK = ("connection", "hub", "job", "launcher")
"""The modules that other distributions may import."""
