"""Shows progress on stderr: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from flagcore.cli.options import patience
from flagcore.contracts import Event, OnEvent
from flagcore.domain.spec import SERVING, objective_value
from flagcore.domain.trial import PROBE, Measurement, Role, Trial, TrialState
from flagcore.i18n import _, printable
from flagcore.report.text import (
    candidate_text,
    duration_text,
    objective_text,
    scaled_text,
    search_time_text,
    short_line,
    state_name,
)


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
        return _("{trial} waits: {reason}", trial=name, reason=trial.reason)
    measurement = trial.measurement if not trial.state.failed else None
    result = _step(trial, measurement, event.objective) if measurement else trial.reason or ""
    if trial.state is TrialState.MEASURED and trial.reason:
        result += f"; {trial.reason}"
    status = ", ".join(_status(event, event.seconds_left))
    return f"{name} {state_name(trial.state.value, trial.fidelity)}: {result}  [{status}]"


def _name(trial: Trial) -> str:
    if trial.fidelity != PROBE:
        return _("trial {number} ({role})", number=trial.number, role=_(trial.role.value))
    name = _("probe {number}", number=trial.number)
    return name + (f" ({_('baseline')})" if trial.role is Role.BASELINE else "")


def _predicted(event: Event) -> str:
    trial = event.trial
    seconds = trial.expected_step_s
    if seconds is None:
        return ""
    value = f"{seconds:.3g} s"
    if event.objective in SERVING:
        value = objective_text(event.objective, objective_value(event.objective, seconds))
    text = ", " + _("predicted ~{value}", value=value)
    short = event.trial.shortened
    if short and short.nodes:
        text += ", " + _("on {nodes} of {of_nodes} nodes", nodes=short.nodes, of_nodes=short.of_nodes)
    elif short:
        text += ", " + _("shortened to {part} of {whole} samples", part=short.global_batch_size, whole=short.whole)
    return text


def details(event: Event) -> list[str]:
    """Return why a trial that starts was chosen, and the path of its log. The list is empty for other events."""
    if event.kind != "trial_started":
        return []
    reason = event.trial.chosen_because
    reason_lines = ["  " + _("chosen for {reason}", reason=reason)] if reason else []
    return [*reason_lines, "  " + _("log: {file}", file=event.trial.log)]


def _status(event: Event, seconds_left: float | None) -> list[str]:
    """Return the state of a search, the most important parts first, because a terminal may cut it."""
    parts = [_("{done}/{total} trials", done=event.trials_finished, total=event.trials_planned)]
    if seconds_left is not None:
        parts.append(_("at most ~{time} left", time=duration_text(seconds_left)))
    if event.best and event.best.measurement:
        result = _step(event.best, event.best.measurement, event.objective).split(", ")[0]
        parts.append(_("best {result} (trial {number})", result=result, number=event.best.number))
    return parts


def _step(trial: Trial, measured: Measurement, objective: str) -> str:
    """Return a measurement in a few words. The mark `~` means that it is partly modelled."""
    if measured.figures:
        return short_line(measured, objective)
    mark = "~" if measured.modelled_s is not None else ""
    text = _("{seconds} s/step", seconds=f"{mark}{measured.step_time_s:.3g}")
    if measured.scaled_from is None:
        return text
    return f"{text} ({scaled_text(measured.scaled_from, trial.shortened)})"


def status_line(event: Event, running: Sequence[Trial], seconds_left: float | None) -> str:
    """Return the state of a search and its running trials in one line."""
    names = [f"{each.number}: {candidate_text(each.candidate, event.knobs)}" for each in running]
    return " | ".join(filter(None, [*_status(event, seconds_left), ", ".join(names)]))


def finished_line(event: Event) -> str:
    """Return the end of a trial with its configuration. For a failure, it contains the reason."""
    trial, measurement = event.trial, event.trial.measurement if not event.trial.state.failed else None
    configuration = candidate_text(trial.candidate, event.knobs)
    text = f"{_name(trial)} {state_name(trial.state.value, trial.fidelity)}"
    if measurement is None:
        return f"{text}: {configuration}: {trial.reason or '-'}"
    return f"{text}: {_step(trial, measurement, event.objective)}: {configuration}"


@contextmanager
def progress(stream: TextIO, quiet: bool, verbose: bool = False) -> Iterator[OnEvent]:
    """Yield a function that prints events to `stream`. With `verbose`, it adds why a trial was chosen, and its log."""

    def on_event(event: Event) -> None:
        cancel()
        lines = [*general_lines(event), line(event), *(details(event) if verbose else [])]
        with suppress(OSError, ValueError):  # a closed stderr must not end the run
            print(printable("\n".join(lines)), file=stream, flush=True)

    if quiet:
        yield lambda event: None
    elif stream.isatty():
        with _bar(stream, verbose) as draw:
            yield draw
    else:
        with patience(_("flag: predicting the candidates")) as cancel:
            yield on_event


@contextmanager
def _bar(stream: TextIO, verbose: bool) -> Iterator[OnEvent]:
    """Draw one line in which the remaining time counts down during a trial, without colours if NO_COLOR is set."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    console, running, spinner = Console(file=stream), dict[int, Trial](), Spinner("dots")
    last: list[tuple[Event, float]] = []
    """The last event, and when it happened."""

    def line_of_search() -> Table:
        text = _("detecting hardware")
        if last:
            (event, since), left = last[-1], last[-1][0].seconds_left
            left = None if left is None else max(left - (time.monotonic() - since), 0.0)
            text = status_line(event, list(running.values()), left)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(spinner, Text(printable(text), no_wrap=True, overflow="ellipsis"))
        return grid

    with Live(console=console, transient=True, get_renderable=line_of_search):

        def draw(event: Event) -> None:
            lines = [*general_lines(event), *([line(event)] if event.kind == "trial_waits" else [])]
            for each in [*lines, *(details(event) if verbose else [])]:
                console.print(printable(each), highlight=False, markup=False)
            if event.kind == "trial_finished":
                running.pop(event.trial.number, None)
                is_cut = not event.trial.state.failed  # a failure is shown in full
                console.print(
                    Text(printable(finished_line(event)), no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold")
                )
            else:
                running[event.trial.number] = event.trial
            last[:] = [(event, time.monotonic())]

        yield draw
