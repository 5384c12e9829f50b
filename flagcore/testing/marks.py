"""Registers the marks of the kit in pytest, by an entry point, so that plugins need no settings."""

from __future__ import annotations

from typing import Any


def pytest_configure(config: Any) -> None:
    """Declare the mark `device`."""
    config.addinivalue_line("markers", "device: needs a real accelerator")
