"""Whoever starts launches, and a started one."""

from __future__ import annotations

from typing import Protocol

from flagcore.domain.launch import Exit, Launch


class Running(Protocol):
    """A started launch."""

    def poll(self) -> Exit | None:
        """Return how it ended, or None while it runs."""

    def wait(self, seconds: float) -> Exit | None:
        """Wait at most `seconds` and return like `poll`."""

    def stop(self) -> Exit:
        """End the whole tree of processes and return how it ended. Returns at once if it has ended."""


class Launcher(Protocol):
    """Starts launches somewhere."""

    name: str

    def start(self, launch: Launch) -> Running:
        """Start `launch` in a process group of its own. Raises FlagError if it cannot be started."""
