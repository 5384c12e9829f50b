"""Progress on stderr: a bar on a terminal, plain lines elsewhere, or lines of JSON for `--log-format json`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any, TextIO

from flagcore.cli import options
from flagcore.contracts import Event, OnEvent
from flagcore.domain.trial import Trial
from flagcore.i18n import _
from flagcore.report.progress import details, fields_of, finished_line, general_lines, line, status_line


@contextmanager
def progress(stream: TextIO, quiet: bool, verbose: bool = False) -> Iterator[OnEvent]:
    """Yield a function that prints events to `stream`; `verbose` adds the log of a trial and why it was chosen."""

    def on_event(event: Event) -> None:
        lines = [*general_lines(event), line(event), *(details(event) if verbose else [])]
        with suppress(OSError, ValueError):  # a closed stderr must not end a run
            print("\n".join(lines), file=stream, flush=True)

    if quiet:
        yield lambda event: None
    elif stream.isatty():
        with _bar(stream, verbose) as draw:
            yield draw
    else:
        yield on_event


@contextmanager
def _bar(stream: TextIO, verbose: bool) -> Iterator[OnEvent]:
    """Draw one line whose time left counts down during a trial; rich omits colours where NO_COLOR is set."""
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    console, running, spinner = Console(file=stream), dict[int, Trial](), Spinner("dots")
    last: list[tuple[Event, float]] = []
    """The last event, and when it happened."""

    class Line:
        """The spinner and the state of the search."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
            width, text = options.max_width - 2, _("detecting hardware")
            if last:
                (event, since), left = last[-1], last[-1][0].seconds_left
                left = None if left is None else max(left - (time.monotonic() - since), 0.0)
                text = status_line(event, list(running.values()), left, width)
            grid = Table.grid(padding=(0, 1))
            grid.add_row(spinner, Text(text, no_wrap=True, overflow="ellipsis"))
            yield grid

    with Live(Line(), console=console, transient=True):

        def draw(event: Event) -> None:
            lines = general_lines(event)
            if event.kind == "trial_finished":
                running.pop(event.trial.number, None)
                lines.append(finished_line(event, console.width))
            else:
                running[event.trial.number] = event.trial
                lines += [line(event)] if event.kind == "trial_waits" else []
            for each in [*lines, *(details(event) if verbose else [])]:
                console.print(each, highlight=False, markup=False)
            last[:] = [(event, time.monotonic())]

        yield draw


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
            print(_line("info", line(event), **fields_of(event)), file=stream, flush=True)

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
