"""Tells pytest the kit's marks. An entry point names it, so that a plugin needs no settings for them."""

from __future__ import annotations

from typing import Any


def pytest_configure(config: Any) -> None:
    """Declare the mark `device`."""
    config.addinivalue_line("markers", "device: needs a real accelerator")
