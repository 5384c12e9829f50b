"""Shows progress on stderr: a bar on a terminal, plain lines elsewhere, or lines of JSON for `--log-format json`."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any, TextIO

from flagcore.cli import options
from flagcore.contracts import Event, OnEvent
from flagcore.domain.spec import objective_value
from flagcore.domain.trial import PROBE, Measurement, Role, Trial, TrialState
from flagcore.i18n import _
from flagcore.i18n.width import columns, cut
from flagcore.report.text import (
    candidate_text,
    duration_text,
    objective_text,
    scaled_text,
    search_time_text,
    short_line,
    state_name,
)

MIN_NAME = 10
"""The minimum number of columns in which a running configuration is shown."""
WIDE = 70
"""The minimum width of a line that says that the remaining time is a maximum."""


def general_lines(event: Event) -> list[str]:
    """Return the lines of an event that do not concern its trial."""
    notes = [_(event.note)] if event.note else []
    return [search_time_text(event.search_time), *notes] if event.search_time else notes


def line(event: Event) -> str:
    """Return an event as one line: trial, result, number of finished trials, remaining time, and best so far."""
    trial, name = event.trial, _name(event.trial)
    if event.kind == "trial_started":
        candidate = candidate_text(trial.candidate, event.knobs)
        return _("{trial} starts: {candidate}", trial=name, candidate=candidate) + _predicted(event)
    if event.kind == "trial_waits":
        return _("{trial} waits for its devices: {reason}", trial=name, reason=trial.reason)
    measurement = trial.measurement if not trial.state.failed else None
    result = _step(trial, measurement, event.objective) if measurement else trial.reason or ""
    if trial.state is TrialState.MEASURED and trial.reason:
        result += f"; {trial.reason}"
    return f"{name} {state_name(trial.state.value, trial.fidelity)}: {result}  [{_status(event)}]"


def _name(trial: Trial) -> str:
    if trial.fidelity != PROBE:
        return _("trial {number} ({role})", number=trial.number, role=_(trial.role.value))
    name = _("probe {number}", number=trial.number)
    return name + (f" ({_('baseline')})" if trial.role is Role.BASELINE else "")


def _predicted(event: Event) -> str:
    trial = event.trial
    step = (trial.believed or {}).get("step_time_s", trial.predicted.get("step_time_s"))
    if not isinstance(step, dict):
        return ""
    if "objective" in trial.predicted:
        value = objective_text(event.objective, objective_value(event.objective, step["value"]))
    else:
        value = f"{step['value']:.3g} s"
    text = ", " + _("predicted ~{value}", value=value)
    short = event.trial.shortened
    if short and short.nodes:
        text += ", " + _("on {nodes} of {of_nodes} nodes", nodes=short.nodes, of_nodes=short.of_nodes)
    elif short:
        text += ", " + _("shortened to {part} of {whole} samples", part=short.global_batch_size, whole=short.whole)
    return text


def details(event: Event) -> list[str]:
    """Return why a trial that starts was chosen, and the path of its log. It is empty for other events."""
    if event.kind != "trial_started":
        return []
    reason = event.trial.chosen_because
    reason_lines = ["  " + _("chosen for {reason}", reason=reason)] if reason else []
    return [*reason_lines, "  " + _("log: {file}", file=event.trial.log)]


def _status(event: Event) -> str:
    parts = [_("{done}/{total} trials", done=event.trials_finished, total=event.trials_planned)]
    if event.seconds_left is not None:
        parts.append(_time_left(event.seconds_left))
    if event.best and event.best.measurement:
        result = _step(event.best, event.best.measurement, event.objective)
        parts.append(_("best {result} (trial {number})", result=result, number=event.best.number))
    return ", ".join(parts)


def _time_left(seconds: float) -> str:
    return _("at most ~{time} left", time=duration_text(seconds))


def _step(trial: Trial, measured: Measurement, objective: str) -> str:
    """Return a measurement in a few words. The mark `~` means that it is partly modelled."""
    if measured.figures:
        return short_line(measured, objective)
    mark = "~" if measured.modelled_s is not None else ""
    text = _("{seconds} s/step", seconds=f"{mark}{measured.step_time_s:.3g}")
    if measured.scaled_from is None:
        return text
    nodes = (trial.shortened.nodes, trial.shortened.of_nodes) if trial.shortened else ()
    return f"{text} ({scaled_text(measured.scaled_from, *nodes)})"


def status_line(event: Event, running: Sequence[Trial], seconds_left: float | None, width: int) -> str:
    """Return the state of a search in one line of at most `width` columns.

    It contains the finished trials, the remaining time, the best so far, and the running configurations. Less important
    parts are shortened if they do not fit.
    """
    parts = [f"{event.trials_finished}/{event.trials_planned}"]
    if seconds_left is not None:
        time_left = _time_left(seconds_left)
        parts.append(time_left if width >= WIDE else _("~{time} left", time=duration_text(seconds_left)))
    names = [f"{each.number}: {candidate_text(each.candidate, event.knobs)}" for each in running]
    best, named = event.best if event.best and event.best.measurement else None, ""
    if best and best.measurement:
        result = _step(best, best.measurement, event.objective).split(",")[0]
        parts.append(_("best {result}", result=result))
        configuration = cut(candidate_text(best.candidate, event.knobs), max(MIN_NAME, width // 4))
        named = f" ({configuration})"
    line = " | ".join(parts)
    if columns(line + named) + (MIN_NAME + len(" | ")) * bool(names) <= width:
        line += named
    room = width - columns(line) - len(" | ")
    return f"{line} | {cut(', '.join(names), room)}" if names and room >= MIN_NAME else cut(line, width)


def finished_line(event: Event, width: int) -> str:
    """Return the end of a trial with its configuration.

    A measurement is cut to one line; a failure is shown in full.
    """
    trial, measurement = event.trial, event.trial.measurement if not event.trial.state.failed else None
    configuration = candidate_text(trial.candidate, event.knobs)
    text = f"{_name(trial)} {state_name(trial.state.value, trial.fidelity)}"
    if measurement is None:
        return f"{text}: {configuration}: {trial.reason or '-'}"
    return cut(f"{text}: {_step(trial, measurement, event.objective)}: {configuration}", width)


def fields_of(event: Event) -> dict[str, Any]:
    """Return the trial of an event and the state of the search as plain data for a line of JSON."""
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


@contextmanager
def progress(stream: TextIO, quiet: bool, verbose: bool = False) -> Iterator[OnEvent]:
    """Yield a function that prints events to `stream`. With `verbose`, it adds why a trial was chosen, and its log."""

    def on_event(event: Event) -> None:
        lines = [*general_lines(event), line(event), *(details(event) if verbose else [])]
        with suppress(OSError, ValueError):  # a closed stderr must not end the run
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
    """Draw one line in which the remaining time counts down during a trial.

    If NO_COLOR is set, rich uses no colours.
    """
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    console, running, spinner = Console(file=stream), dict[int, Trial](), Spinner("dots")
    last: list[tuple[Event, float]] = []
    """The last event, and when it happened."""

    class Line:
        """Draws the spinner and the state of the search."""

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
    """Print all later messages of this process as lines of JSON, and yield a function that prints events.

    Each line has `time` (ISO 8601, UTC), `level` and `message`. Lines about trials also have `event` and the trial.
    """

    class Lines(logging.Formatter):
        """Formats a log record as one line of JSON."""

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
    options.FORMAT_OF_MESSAGES[:] = [_line]  # kept until the process ends, for the error that ends it
    try:
        yield on_event
    finally:
        logging.getLogger().removeHandler(handler)


def _line(level: str, message: str, **fields: Any) -> str:
    moment = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": moment, "level": level, "message": message, **fields}, ensure_ascii=False)
