"""Messages, warnings and progress as lines of JSON on stderr, for `--log-format json`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any, TextIO

from flagcore.cli import options
from flagcore.cli.progress import line
from flagcore.contracts import Event, OnEvent


@contextmanager
def json_lines(stream: TextIO, quiet: bool) -> Iterator[OnEvent]:
    """Print all further messages of this process as lines of JSON, and yield a function that prints events.

    Each line has `time` (ISO 8601, UTC), `level` and `message`; lines of trials also have `event` and the trial.
    """

    class Lines(logging.Formatter):
        """Formats a record of logging as one line."""

        def format(self, record: logging.LogRecord) -> str:
            error = {"error": self.formatException(record.exc_info)} if record.exc_info else {}
            return _line(record.levelname.lower(), record.getMessage(), logger=record.name, **error)

    def on_event(event: Event) -> None:
        if quiet:
            return
        with suppress(OSError, ValueError):
            print(_line("info", line(event), **_fields(event)), file=stream, flush=True)

    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines())
    logging.getLogger().addHandler(handler)
    options.FORMAT_OF_MESSAGES[:] = [_line]  # until the end of the process, for the error that ends it
    try:
        yield on_event
    finally:
        logging.getLogger().removeHandler(handler)


def _line(level: str, message: str, **fields: Any) -> str:
    moment = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": moment, "level": level, "message": message, **fields}, ensure_ascii=False)


def _fields(event: Event) -> dict[str, Any]:
    trial = event.trial
    measured = trial.measurement
    return {
        "event": event.kind,
        "trial": {
            "number": trial.number,
            "role": trial.role.value,
            "state": trial.state.value,
            "candidate": trial.candidate.as_dict(),
            "reason": trial.reason,
            "step_time_s": measured.step_time_s if measured else None,
            "log": trial.log,
        },
        "best": event.best.number if event.best else None,
        "trials_finished": event.trials_finished,
        "trials_planned": event.trials_planned,
        "seconds_left": event.seconds_left,
    }
