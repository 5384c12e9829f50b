"""The reduction of the search space by rules, the progress of the search, and predicted against measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flagcore.domain.objective import is_rate, objective_value
from flagcore.domain.trial import ESTIMATE
from flagcore.i18n import _, ngettext
from flagcore.report.page.blocks import (
    MARGIN,
    Chart,
    Collapsed,
    Section,
    Text,
    bars,
    cell,
    label,
    layout,
    line,
    percent,
    points,
    rows_layout,
    spread_axis,
    table,
)
from flagcore.report.page.run import MAX_LISTED, RunData, configuration, listed, name_of, trial_cell
from flagcore.report.result import TrialResult
from flagcore.report.text import Removed, funnel_stages, repeats_text, state_name


def progress(run: RunData) -> Section | None:
    """Return the best so far over time; None without trials."""
    if run.fidelity == ESTIMATE or not run.trials:
        return None
    history = _read_progress(run)
    data = table(
        _("Trials in the order of their start, with the best {unit} so far", unit=run.unit),
        [_("trial"), _("configuration"), _("state"), _("elapsed, s"), run.unit, _("best so far")],
        history.rows,
    )
    if not history.steps:
        return Section(anchor="progress", title=_("Search"), blocks=(Text(_("No trial was measured.")), data))
    summary = [
        _("{count:,} trials (with repeats) took {seconds:,.0f} s.", count=len(run.all_trials), seconds=history.spent_s),
        _improvement(run, history.steps[0][1], history.steps[-1][1]),
    ]
    if "repeat" in history.ran:
        summary.append(_("The best configuration is chosen by the median of all runs of a candidate."))
    chart = Chart(
        title=_("Best so far over time"),
        summary=" ".join(summary),
        traces=tuple(_progress_traces(history)),
        layout=layout(_("total time of trials, s"), run.unit),
        table=data,
    )
    return Section(anchor="progress", title=_("Search"), blocks=(chart,))


@dataclass
class _Progress:
    """Trials in their order: table rows, measured points by kind, failures, and the best so far, over seconds."""

    rows: list[list[Any]] = field(default_factory=list)
    ran: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict)
    failed: list[tuple[float, str]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    spent_s: float = 0.0


def _read_progress(run: RunData) -> _Progress:
    history, best = _Progress(), None
    first, shown_numbers = {trial.number for trial in run.trials}, listed(run)
    for trial in run.all_trials:
        history.spent_s += float(trial.duration_s)
        spent, figure = history.spent_s, run.figure(trial)
        if trial.number in first:
            if figure is not None and trial.state == "measured" and not trial.broken:
                best = figure if best is None else (max if is_rate(run.objective) else min)(best, figure)
            if best is not None:
                history.steps.append((spent, best))
        if figure is not None:
            kind = "stopped" if trial.state == "stopped" else "repeat" if trial.role == "repeat" else "trial"
            history.ran.setdefault(kind, []).append((spent, figure, name_of(run, trial)))
        else:
            history.failed.append((spent, name_of(run, trial)))
        if trial.number in shown_numbers:
            history.rows.append(
                [
                    trial_cell(run, trial),
                    configuration(run, trial),
                    state_name(trial.state, trial.fidelity),
                    cell(float(spent)),
                    cell(figure),
                    cell(best),
                ]
            )
    return history


def _progress_traces(history: _Progress) -> Iterator[dict[str, Any]]:
    best = line(_("best so far (first runs)"), 0, *zip(*history.steps, strict=True))
    best["line"] |= {"shape": "hv"}
    yield best
    names = {"trial": _("trial"), "repeat": _("repeat"), "stopped": _("stopped early")}
    for series, kind in enumerate(names, start=1):
        if of_kind := history.ran.get(kind):
            x, y, numbers = zip(*of_kind, strict=True)
            yield points(names[kind], series, x, y, text=list(numbers))
    if history.failed:
        lowest = min(y for of_kind in history.ran.values() for _, y, _ in of_kind)
        seconds, numbers = zip(*history.failed, strict=True)
        yield points(_("not measured"), 4, seconds, [lowest] * len(seconds), text=list(numbers))


def _improvement(run: RunData, first: float, last: float) -> str:
    start, end = cell(first).text, cell(last).text
    if start == end:
        return _("The first measured trial was the fastest: {value} {unit}.", value=start, unit=run.unit)
    return _("The best improved from {start} to {end} {unit}.", start=start, end=end, unit=run.unit)


def funnel(run: RunData) -> Section:
    """Return the counts from all combinations to the candidates, and from these to the untried ones."""
    counts, reasons = run.result.counts, run.insight.get("messages", {})
    illegal, states = funnel_stages(counts, run.fidelity)
    combinations, candidates = (_("combinations"), counts.combinations), (_("candidates"), counts.candidates)
    blocks = (
        _chart(_("From combinations to candidates"), combinations, illegal, candidates, reasons),
        _chart(_("States of the candidates"), candidates, states, (_("untried"), counts.untried), reasons),
    )
    counted = _("{combinations:,} combinations, {candidates:,} candidates, {untried:,} untried", **asdict(counts))
    folded = Collapsed(anchor="rules", title=counted, blocks=blocks)
    notes = (Text(line) for line in repeats_text(run.result.lost_repeats))
    return Section(anchor="funnel", title=_("Search space"), blocks=(folded, *notes))


def _chart(
    title: str, start: tuple[str, int], removed: Sequence[Removed], end: tuple[str, int], messages: Mapping[str, str]
) -> Chart:
    data = table(
        _("{title}; removed counts are negative", title=title),
        [_("stage"), _("number"), _("why")],
        [
            [*start, ""],
            *([name, cell(-count), messages.get(rule, "")] for rule, name, count in removed),
            [*end, ""],
        ],
    )
    visible_bars = [(name, count) for _, name, count in removed if count]
    names = [start[0], *(name for name, _ in visible_bars), end[0]]
    counts = [count for _, count in visible_bars]
    offsets = [start[1] - sum(counts[:place]) for place in range(len(counts) + 1)]
    text = [f"{start[1]:,}", *(f"-{count:,}" for count in counts), f"{end[1]:,}"]
    labels = {"text": text, "textposition": "outside", "cliponaxis": False}
    lines = max(label(name).count("<br>") + 1 for name in names)
    summary = f"{start[0]}: {start[1]:,}; {end[0]}: {end[1]:,}."
    if visible_bars:
        name, count = max(visible_bars, key=lambda each: each[1])
        summary += " " + _('Largest group removed: "{name}", {count:,}.', name=name, count=count)
    return Chart(
        title=title,
        summary=summary,
        traces=(
            bars(_("left"), 0, [*offsets, end[1]], names),
            bars(_("removed"), 1, [0, *counts, 0], names, **labels),
        ),
        layout=rows_layout(
            start[0], len(names), each=14 + 15 * lines, barmode="stack", xaxis={"range": [0, max(start[1], 1)]}
        )
        | {"margin": MARGIN | {"r": 8 * max(map(len, text)) + 6}},
        table=data,
    )


def accuracy(run: RunData) -> Section | None:
    """Return the errors of predictions; None if no trial is both predicted and measured."""
    pairs = [(trial, both) for trial in run.trials if (both := _measured_and_predicted(run, trial)) is not None]
    if not pairs:
        return None
    blocks = (_scatter(run, pairs), learning(run))
    return Section(anchor="accuracy", title=_("Predictions"), blocks=tuple(filter(None, blocks)))


def _measured_and_predicted(run: RunData, trial: TrialResult) -> tuple[float, ...] | None:
    """Return the measured figure of a trial, and the predicted figure with its interval."""
    key = "objective" if run.serves else "step_time_s"
    predicted, seconds = trial.predicted.interval(key), trial.measured_s
    if seconds is None or predicted is None:
        return None
    figure = objective_value(run.objective, seconds) if run.serves else seconds
    return figure, predicted.value, predicted.low, predicted.high


def _scatter(run: RunData, pairs: list[tuple[TrialResult, tuple[float, ...]]]) -> Chart:
    unit = run.unit if run.serves else _("s/step")
    rows, shown_numbers = [], listed(run)
    for trial, (measured, value, low, high) in (pair for pair in pairs if pair[0].number in shown_numbers):
        is_inside = low <= measured <= high
        figures = [cell(each) for each in (measured, value, low, high)]
        deviation = percent(measured / value - 1.0 if value else None, signed=True)
        verdict = _("inside") if is_inside else _("outside")
        rows.append([trial_cell(run, trial), configuration(run, trial), *figures, deviation, verdict])
    headings = [_("trial"), _("configuration"), _("measured"), _("~predicted"), _("~low"), _("~high"), _("error")]
    data = table(
        _("Measured and predicted {unit}, with 80% intervals", unit=unit),
        [*headings, _("80% interval")],
        rows,
        sortable=True,
    )
    values = [each for _, both in pairs for each in both]
    value_range = [min(values), max(values)]
    x, y = [both[0] for _, both in pairs], [both[1] for _, both in pairs]
    errors = {
        "visible": len(pairs) <= MAX_LISTED,  # thousands of bars are slow, and hide each other
        "type": "data",
        "symmetric": False,
        "array": [both[3] - both[1] for _, both in pairs],
        "arrayminus": [both[1] - both[2] for _, both in pairs],
        "thickness": 1,
        "width": 4,
    }
    hits = sum(low <= measured <= high for _, (measured, _, low, high) in pairs)
    kind = spread_axis(values)
    return Chart(
        title=_("Predicted against measured"),
        summary=_("{count} of {total} measurements are inside the 80% interval.", count=hits, total=len(pairs)),
        traces=(
            line(_("predicted = measured"), 2, value_range, value_range),
            points(
                _("trial, with 80% interval"),
                0,
                x,
                y,
                error_y=errors,
                text=[name_of(run, each) for each, _ in pairs],
            ),
        ),
        layout=layout(
            _("measured {unit}", unit=unit),
            _("predicted {unit}", unit=unit),
            height=430,
            xaxis=dict(kind),
            yaxis=dict(kind),
        ),
        table=data,
    )


def learning(run: RunData) -> Chart | None:
    """Return the errors of predictions before and after learning, per trial; None without learning."""
    errors = run.result.predictions_off
    pairs = [
        (trial, over["predicted"] or 0.0, over["believed"] or 0.0)
        for trial in run.trials
        if (over := trial.measured_over).get("predicted") and over.get("believed")
    ]
    if not errors or not pairs:
        return None
    rows, shown_numbers = [], listed(run)
    for trial, before, after in (pair for pair in pairs if pair[0].number in shown_numbers):
        step = trial.measured_s or 0.0
        seconds = [step / before, step / after, step]
        figures = [objective_value(run.objective, each) for each in seconds] if run.serves else seconds
        shares = [percent(each - 1.0, signed=True) for each in (before, after)]
        rows.append([cell(trial.number), *map(cell, figures), *shares])
    heading = run.unit if run.serves else _("step s")
    headings = [_("trial"), f"~{heading}", _("~learned"), heading, _("error"), _("after learning")]
    numbers = [str(trial.number) for trial, _, _ in pairs]
    return Chart(
        title=_("Learning during the run"),
        summary=ngettext(
            "Median prediction error over {count} trial: {before}, after learning {after}.",
            "Median prediction error over {count} trials: {before}, after learning {after}.",
            errors.trials,
            before=_error_text(errors.before),
            after=_error_text(errors.after),
        ),
        traces=(
            line(_("no error"), 6, numbers, [0.0] * len(pairs), line={"color": "#888888", "width": 1, "dash": "dot"}),
            points(_("first prediction"), 1, numbers, [before - 1.0 for _, before, _ in pairs], mode="lines+markers"),
            points(_("after learning"), 0, numbers, [after - 1.0 for _, _, after in pairs], mode="lines+markers"),
        ),
        layout=layout(
            _("trial"),
            _("measured over predicted"),
            xaxis={"type": "category"},
            yaxis={"tickformat": "+.0%"},
            height=340,
        ),
        table=table(_("Relative error of the step time: measured / predicted - 1"), headings, rows),
    )


def _error_text(share: float) -> str:
    """Return a relative error as percent, or as a factor from 100% on."""
    return f"{share:.1%}" if share < 1.0 else _("a factor of {factor}", factor=f"{1.0 + share:.3g}")
