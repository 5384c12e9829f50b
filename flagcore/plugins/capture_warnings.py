"""Hears the warnings that are logged while a plugin is asked: by them it tells why it found no device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def capture_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings and errors that are logged meanwhile; they go on to whoever handles them."""
    said: list[str] = []
    make = logging.getLogRecordFactory()

    def listening(*arguments: object, **named: object) -> logging.LogRecord:
        record = make(*arguments, **named)
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())
        return record

    logging.setLogRecordFactory(listening)
    try:
        yield said
    finally:
        logging.setLogRecordFactory(make)
