"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from flagcore.contracts import Event, OnEvent
from flagcore.domain.trial import PROBE, Measurement, Role, Trial, TrialState
from flagcore.i18n import _
from flagcore.report.text import (
    candidate_text,
    objective_text,
    role_text,
    scaled_text,
    search_time_text,
    short_line,
    state_name,
)


@contextmanager
def progress(stream: TextIO, quiet: bool, verbose: bool = False) -> Iterator[OnEvent]:
    """Yield a function that prints events to `stream`; `verbose` adds the log of a trial and why it was chosen."""
    if quiet:
        yield lambda event: None
    elif stream.isatty():
        with _bar(stream, verbose) as draw:
            yield draw
    else:
        yield lambda event: _print("\n".join([*_lines(event), *(_details(event) if verbose else [])]), stream)


def _print(text: str, stream: TextIO) -> None:
    """Print a line; a closed stderr must not end a run."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def _lines(event: Event) -> list[str]:
    return [*_general(event), line(event)]


def _general(event: Event) -> list[str]:
    """Return the lines of an event that are not about its trial."""
    notes = [_(event.note)] if event.note else []
    return [search_time_text(event.search_time), *notes] if event.search_time else notes


def line(event: Event) -> str:
    """Return an event as one line: the trial, its result, finished trials, time left, best so far."""
    trial = event.trial
    name = _("trial {number} ({role})", number=trial.number, role=role_text(trial.role.value))
    if trial.fidelity == PROBE:
        name = _("probe {number}", number=trial.number)
        name += f" ({_('baseline')})" if trial.role is Role.BASELINE else ""
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


def _predicted(event: Event) -> str:
    step, objective = (event.trial.predicted.get(key) for key in ("step_time_s", "objective"))
    if isinstance(objective, dict):
        return ", " + _("predicted ~{value}", value=objective_text(event.objective, objective["value"]))
    if not isinstance(step, dict):
        return ""
    text = ", " + _("predicted ~{value}", value=f"{step['value']:.3g} s")
    short = event.trial.shortened
    if short and short.nodes:
        text += ", " + _("on {nodes} of {of_nodes} nodes", nodes=short.nodes, of_nodes=short.of_nodes)
    elif short:
        text += ", " + _("shortened to {part} of {whole} samples", part=short.global_batch_size, whole=short.whole)
    return text


def _details(event: Event) -> list[str]:
    if event.kind != "trial_started":
        return []
    reason = event.trial.chosen_because
    reason_lines = ["  " + _("chosen for {reason}", reason=reason)] if reason else []
    return [*reason_lines, "  " + _("log: {file}", file=event.trial.log)]


def _status(event: Event, *, with_time: bool = True) -> str:
    parts = [_("{done}/{total} trials", done=event.trials_finished, total=event.trials_planned)]
    if event.seconds_left is not None and with_time:
        parts.append(_time_left(event.seconds_left))
    if event.best and event.best.measurement:
        result = _step(event.best, event.best.measurement, event.objective)
        parts.append(_("best {result} (trial {number})", result=result, number=event.best.number))
    return ", ".join(parts)


def _time_left(seconds: float) -> str:
    return _("at most ~{minutes} min left", minutes=f"{max(seconds, 0.0) / 60:.1f}")


def _step(trial: Trial, measured: Measurement, objective: str) -> str:
    """Return a measurement in a few words; `~` marks one that is partly modelled."""
    if measured.figures:
        return short_line(measured, objective)
    mark = "~" if measured.modelled_s is not None else ""
    text = _("{seconds} s/step", seconds=f"{mark}{measured.step_time_s:.3g}")
    if measured.scaled_from is None:
        return text
    nodes = (trial.shortened.nodes, trial.shortened.of_nodes) if trial.shortened else ()
    return f"{text} ({scaled_text(measured.scaled_from, *nodes)})"


@contextmanager
def _bar(stream: TextIO, verbose: bool) -> Iterator[OnEvent]:
    """Draw a bar whose time left counts down during a trial; rich omits colours where NO_COLOR is set."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """The time left at the last event, counting down; empty until it is known."""

        def render(self, task: Task) -> Text:
            end_time = task.fields["ends"]
            return Text("" if end_time is None else _time_left(end_time - time.monotonic()))

    console = Console(file=stream)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), BarColumn(bar_width=24), text, TimeLeft(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(_("detecting hardware"), total=None, ends=None)

        running: set[int] = set()

        def draw(event: Event) -> None:
            lines = _general(event)
            lines += [line(event)] if event.kind != "trial_started" else []
            for each in [*lines, *(_details(event) if verbose else [])]:
                console.print(each, highlight=False, markup=False)
            change = running.discard if event.kind == "trial_finished" else running.add
            change(event.trial.number)
            numbers = ", ".join(map(str, sorted(running)))
            suffix = " | " + _("trial {number} running", number=numbers) if running else ""
            bar.update(
                task,
                total=event.trials_planned,
                completed=event.trials_finished,
                description=_status(event, with_time=False) + suffix,
                ends=None if event.seconds_left is None else time.monotonic() + event.seconds_left,
            )

        yield draw
