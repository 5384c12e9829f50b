"""The command `flag`: parse, call flagcore.api, print. Commands import their modules when they run."""

from flagcore.cli.main import main

__all__ = ["main"]
