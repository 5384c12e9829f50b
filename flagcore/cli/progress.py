"""Shows progress on stderr: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from flagcore.cli.options import patience
from flagcore.contracts import Event, OnEvent
from flagcore.domain.spec import SERVING, objective_value
from flagcore.domain.trial import PROBE, Measurement, Role, Trial, TrialState
from flagcore.i18n import N_, _, printable
from flagcore.report import text as texts


def general_lines(event: Event) -> list[str]:
    """Return the lines of an event that do not concern its trial."""
    notes = [_(event.note)] if event.note else []
    return [texts.search_time_text(event.search_time), *notes] if event.search_time else notes


def line(event: Event) -> str:
    """Return an event as one line: trial, result, number of finished trials, remaining time, and best so far."""
    trial, name = event.trial, _name(event.trial)
    if event.kind == "trial_started":
        candidate = texts.candidate_text(trial.candidate, event.knobs)
        return _("{trial} starts: {candidate}", trial=name, candidate=candidate) + _predicted(event)
    if event.kind == "trial_waits":
        return _("{trial} waits: {reason}", trial=name, reason=_(trial.reason or ""))
    measurement = trial.measurement if not trial.state.failed else None
    result = _step(trial, measurement, event.objective) if measurement else texts.reason_text(trial.reason)
    if trial.state is TrialState.MEASURED and trial.reason:
        result += f"; {texts.reason_text(trial.reason)}"
    status = ", ".join(_status(event, event.seconds_left))
    return f"{name} {texts.state_name(trial.state.value, trial.fidelity)}: {result}  [{status}]"


def _name(trial: Trial) -> str:
    if trial.fidelity != PROBE:
        return _("trial {number} ({role})", number=trial.number, role=_(trial.role.value))
    name = _("probe {number}", number=trial.number)
    return name + (f" ({_('baseline')})" if trial.role is Role.BASELINE else "")


def _predicted(event: Event) -> str:
    seconds = event.trial.expected_step_s
    if seconds is None:
        return ""
    value = f"{seconds:.3g} s"
    if event.objective in SERVING:
        value = texts.objective_text(event.objective, objective_value(event.objective, seconds))
    text = ", " + _(N_("expected ~{value}") if event.trial.believed else N_("predicted ~{value}"), value=value)
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
        parts.append(_("at most ~{time} left", time=texts.duration_text(seconds_left)))
    if event.best and event.best.measurement:
        result = _step(event.best, event.best.measurement, event.objective).split(", ")[0]
        parts.append(_("best {result} (trial {number})", result=result, number=event.best.number))
    return parts


def _step(trial: Trial, measured: Measurement, objective: str) -> str:
    """Return a measurement in a few words. The mark `~` means that it is partly modelled."""
    if measured.figures:
        return texts.short_line(measured, objective)
    mark = "~" if measured.modelled_s is not None else ""
    text = _("{seconds} s/step", seconds=f"{mark}{measured.step_time_s:.3g}")
    if measured.scaled_from is None:
        return text
    return f"{text} ({texts.scaled_text(measured.scaled_from, trial.shortened)})"


def live_lines(event: Event, running: Iterable[Event], passed_s: float) -> list[tuple[str, str]]:
    """Return the state of a search in lines, each with a style: the budget, each running trial, and the best so far.

    `running`: the first event of each running trial. `passed_s`: the seconds since `event`.
    """
    left = None if event.seconds_left is None else max(event.seconds_left - passed_s, 0.0)
    budget = _status(event, left)[: 1 if left is None else 2]
    budget.insert(1, _("{time} elapsed", time=texts.duration_text(event.elapsed_s + passed_s)))
    lines = [(", ".join(budget), "")]
    for start in running:
        text = f"{_phase(start)}: {start.trial.number}: {texts.candidate_text(start.trial.candidate, start.knobs)}"
        if start.steps is not None:
            done, total = start.steps()
            text += ", " + _("step {done}/{total}", done=done, total=total)
        lines.append((text + _predicted(start), ""))
    for place, trial in enumerate(event.leaders, start=1):
        result = _step(trial, trial.measurement, event.objective).split(", ")[0] if trial.measurement else "-"
        text = f"{place}. {result}: {texts.candidate_text(trial.candidate, event.knobs)}"
        lines.append((text, "green" if trial == event.best else ""))
    return lines


def _phase(event: Event) -> str:
    """Return the phase of the search to which a trial belongs."""
    if event.repeats is None:
        return _(event.trial.role.value)
    return _("confirm, repeat {number}/{total}", number=event.repeats[0] + 1, total=event.repeats[1])


def _share_done(event: Event, passed_s: float) -> float:
    """Return the share of the search that is done, by time if the remaining time is known."""
    elapsed = event.elapsed_s + passed_s
    if event.seconds_left is None:
        return event.trials_finished / max(event.trials_planned, 1)
    return elapsed / max(elapsed + max(event.seconds_left - passed_s, 0.0), 1e-9)


def finished_line(event: Event) -> str:
    """Return the end of a trial with its configuration. For a failure, it contains the reason."""
    trial, measurement = event.trial, event.trial.measurement if not event.trial.state.failed else None
    configuration = texts.candidate_text(trial.candidate, event.knobs)
    text = f"{_name(trial)} {texts.state_name(trial.state.value, trial.fidelity)}"
    if measurement is None:
        return f"{text}: {configuration}: {texts.reason_text(trial.reason) or '-'}"
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
    """Draw the state of the search below the lines of finished trials, without colours if NO_COLOR is set."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table
    from rich.text import Text

    console, running, spinner = Console(file=stream), dict[int, Event](), Spinner("dots")
    last: list[tuple[Event, float]] = []
    """The last event, and when it happened."""

    def text_of(line: str, style: str = "", *, whole: bool = False) -> Text:
        return Text(printable(line), style, no_wrap=not whole, overflow="fold" if whole else "ellipsis")

    def view() -> Group:
        grid = Table.grid(padding=(0, 1))
        if not last:
            grid.add_row(spinner, text_of(_("detecting hardware")))
            return Group(grid)
        ((event, since),) = last
        passed_s = time.monotonic() - since
        first, *others = [text_of(*each) for each in live_lines(event, [*running.values()], passed_s)]
        grid.add_row(spinner, ProgressBar(1.0, _share_done(event, passed_s), width=BAR_WIDTH), first)
        return Group(grid, *others)

    with Live(console=console, transient=True, get_renderable=view):

        def draw(event: Event) -> None:
            lines = [*general_lines(event), *([line(event)] if event.kind == "trial_waits" else [])]
            for each in [*lines, *(details(event) if verbose else [])]:
                console.print(printable(each), highlight=False, markup=False)
            if event.kind == "trial_finished":
                running.pop(event.trial.number, None)
                is_failed = event.trial.state.failed  # a failure is shown in full
                style = "red" if is_failed else "green" if event.trial == event.best else ""
                console.print(text_of(finished_line(event), style, whole=is_failed))
            elif event.kind == "trial_started":
                running[event.trial.number] = event
            last[:] = [(event, time.monotonic())]

        yield draw


BAR_WIDTH = 20
