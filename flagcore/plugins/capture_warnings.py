"""Collects warnings that a plugin logs, for instance why it found no device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings and errors that are logged in this context; handlers still receive them."""
    texts: list[str] = []
    make = logging.getLogRecordFactory()

    def record_and_collect(*arguments: object, **named: object) -> logging.LogRecord:
        record = make(*arguments, **named)
        if record.levelno >= logging.WARNING:
            texts.append(record.getMessage())
        return record

    logging.setLogRecordFactory(record_and_collect)
    try:
        yield texts
    finally:
        logging.setLogRecordFactory(make)
