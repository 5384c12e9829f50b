"""The command `flag`: parse, call flagcore.api, print. Each command imports what it needs when it runs."""

from flagcore.cli.main import main

__all__ = ["main"]
