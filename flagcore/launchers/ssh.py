"""The ssh launcher: the system's OpenSSH client starts agents, with the configuration of the user."""

from __future__ import annotations

from flagcore.contracts import Launcher
from flagcore.launchers.connection import agent_command
from flagcore.launchers.hosts import HostsLauncher

OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=3", "ServerAliveCountMax=3", "ControlPath=none")
"""No password prompts, and a separate connection per agent that detects a lost host."""


def channel(host: str) -> list[str]:
    """Return the command that starts an agent on `host` by ssh."""
    options = [word for option in OPTIONS for word in ("-o", option)]
    return ["ssh", "-T", *options, "--", host, agent_command()]


LAUNCHER: Launcher = HostsLauncher(name="ssh", channel=channel)
