"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from flagcore.contracts import Event, OnEvent
from flagcore.domain.trial import PROBE, Measurement, Role
from flagcore.report.served import objective_text, short_line
from flagcore.report.text import candidate_text, state_text


@contextmanager
def progress(stream: TextIO, quiet: bool) -> Iterator[OnEvent]:
    """Yield what draws events on `stream`."""
    if quiet:
        yield lambda event: None
    elif stream.isatty():
        with _bar(stream) as draw:
            yield draw
    else:
        yield lambda event: _print(line(event), stream)


def _print(text: str, stream: TextIO) -> None:
    """Print a line; a reader of stderr that is gone must not end a run."""
    with suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def line(event: Event) -> str:
    """Return an event as one line: what runs or ran, how many are done, time left, best so far."""
    trial = event.trial
    what = f"trial {trial.number} ({trial.role.value})"
    if trial.fidelity == PROBE:
        what = f"probe {trial.number}" + (" (baseline)" if trial.role is Role.BASELINE else "")
    if event.kind == "trial_started":
        step, figure = trial.predicted.get("step_time_s"), trial.predicted.get("objective")
        guess = f", predicted ~{step['value']:.3g} s" if isinstance(step, dict) else ""
        if isinstance(figure, dict):
            guess = f", predicted ~{objective_text(event.objective, figure['value'])}"
        return f"{what} starts: {candidate_text(trial.candidate)}{guess}"
    timed = trial.measurement if not trial.state.failed else None
    said = _step(timed, event.objective, " a step") if timed else trial.reason or ""
    return f"{what} {state_text(trial)}: {said}  [{_state(event)}]"


def _state(event: Event) -> str:
    parts = [f"{event.trials_finished}/{event.trials_planned} trials"]
    if event.seconds_left is not None:
        parts.append(f"at most ~{event.seconds_left / 60:.1f} min left")
    if event.best and event.best.measurement:
        parts.append(f"best {_step(event.best.measurement, event.objective)} (trial {event.best.number})")
    return ", ".join(parts)


def _step(measured: Measurement, objective: str, what: str = "") -> str:
    """Return a measurement in a few words; `~` marks what is modelled in part."""
    if measured.figures:
        return short_line(measured, objective)
    return f"{'~' if measured.modelled_s is not None else ''}{measured.step_time_s:.3g} s{what}"


@contextmanager
def _bar(stream: TextIO) -> Iterator[OnEvent]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=stream)
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("looking at the hardware", total=None)

        def draw(event: Event) -> None:
            if event.kind == "trial_finished":
                console.print(line(event), highlight=False, markup=False)
            running = f" | trial {event.trial.number} runs" if event.kind == "trial_started" else ""
            bar.update(
                task, total=event.trials_planned, completed=event.trials_finished, description=_state(event) + running
            )

        yield draw
