"""Launchers that start trials on several hosts with an agent on each: `ssh`, `slurm`, and the base class of others."""

SDK = ("flagcore_hosts.connection", "flagcore_hosts.hub", "flagcore_hosts.launcher")
"""The modules that other distributions may import."""
