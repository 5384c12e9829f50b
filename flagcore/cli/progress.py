"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from flagcore.contracts import Event, OnEvent
from flagcore.domain.trial import PROBE, Measurement, Role
from flagcore.i18n import said
from flagcore.report.serving_text import objective_text, short_line
from flagcore.report.text import candidate_text, state_text


@contextmanager
def progress(stream: TextIO, quiet: bool, verbose: bool = False) -> Iterator[OnEvent]:
    """Yield what draws events on `stream`; `verbose` tells why each trial was chosen and where its log is, too."""
    if quiet:
        yield lambda event: None
    elif stream.isatty():
        with _bar(stream, verbose) as draw:
            yield draw
    else:
        yield lambda event: _print("\n".join([line(event), *(_more(event) if verbose else [])]), stream)


def _print(text: str, stream: TextIO) -> None:
    """Print a line; a reader of stderr that is gone must not end a run."""
    with suppress(OSError, ValueError):
        print(said(text), file=stream, flush=True)


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


def _more(event: Event) -> list[str]:
    """Return, of a trial that starts, why it was chosen and where its log is."""
    why = event.trial.chosen_because
    told = [*([f"  chosen for {why}"] if why else []), f"  log: {event.trial.log}"]
    return told if event.kind == "trial_started" else []


def _state(event: Event, *, with_time: bool = True) -> str:
    parts = [f"{event.trials_finished}/{event.trials_planned} trials"]
    if event.seconds_left is not None and with_time:
        parts.append(_left(event.seconds_left))
    if event.best and event.best.measurement:
        parts.append(f"best {_step(event.best.measurement, event.objective)} (trial {event.best.number})")
    return ", ".join(parts)


def _left(seconds: float) -> str:
    return f"at most ~{max(seconds, 0.0) / 60:.1f} min left"


def _step(measured: Measurement, objective: str, what: str = "") -> str:
    """Return a measurement in a few words; `~` marks what is modelled in part."""
    if measured.figures:
        return short_line(measured, objective)
    return f"{'~' if measured.modelled_s is not None else ''}{measured.step_time_s:.3g} s{what}"


@contextmanager
def _bar(stream: TextIO, verbose: bool) -> Iterator[OnEvent]:
    """Draw a bar whose time left goes down while a trial runs; rich leaves colours out where NO_COLOR is set."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class TimeLeft(ProgressColumn):
        """What is left of the time that was told at the last event."""

        def render(self, task: Task) -> Text:
            """Return it, nothing before it is known."""
            ends = task.fields["ends"]
            return Text("" if ends is None else said(_left(ends - time.monotonic())))

    console = Console(file=stream)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), BarColumn(bar_width=24), text, TimeLeft(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(said("looking at the hardware"), total=None, ends=None)

        def draw(event: Event) -> None:
            told = [line(event)] if event.kind == "trial_finished" else []
            for each in [*told, *(_more(event) if verbose else [])]:
                console.print(said(each), highlight=False, markup=False)
            running = f" | trial {event.trial.number} runs" if event.kind == "trial_started" else ""
            left, done = event.seconds_left, event.trials_finished
            bar.update(
                task,
                total=event.trials_planned,
                completed=done,
                description=said(_state(event, with_time=False) + running),
                ends=None if left is None else time.monotonic() + left,
            )

        yield draw
