"""The reduction of the search space by rules, and the progress of the search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flagcore.domain.objective import is_rate
from flagcore.domain.plan import Counts
from flagcore.domain.trial import ESTIMATE
from flagcore.i18n import _
from flagcore.report.page.blocks import Chart, Collapsed, Section, Text, cell, table
from flagcore.report.page.charts import MARGIN, bars, label, layout, line, points, rows_layout
from flagcore.report.page.run import RunData, configuration, listed, name_of, trial_cell
from flagcore.report.text import Removed, funnel_stages, lost_repeats, repeats_text, state_name


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
    first, shown_numbers = {trial["number"] for trial in run.trials}, listed(run)
    for trial in run.all_trials:
        history.spent_s += float(trial["duration_s"])
        spent, figure = history.spent_s, run.figure(trial)
        if trial["number"] in first:
            if figure is not None and trial["state"] == "measured" and not trial["measured"].get("broken"):
                best = figure if best is None else (max if is_rate(run.objective) else min)(best, figure)
            if best is not None:
                history.steps.append((spent, best))
        if figure is not None:
            kind = "stopped" if trial["state"] == "stopped" else "repeat" if trial["role"] == "repeat" else "trial"
            history.ran.setdefault(kind, []).append((spent, figure, name_of(run, trial)))
        else:
            history.failed.append((spent, name_of(run, trial)))
        if trial["number"] in shown_numbers:
            history.rows.append(
                [
                    trial_cell(run, trial),
                    configuration(run, trial),
                    state_name(trial["state"], trial["fidelity"]),
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
    counts, reasons = Counts(**run.result["counts"]), run.insight.get("messages", {})
    illegal, states = funnel_stages(counts, run.fidelity)
    combinations, candidates = (_("combinations"), counts.combinations), (_("candidates"), counts.candidates)
    blocks = (
        _chart(_("From combinations to candidates"), combinations, illegal, candidates, reasons),
        _chart(_("States of the candidates"), candidates, states, (_("untried"), counts.untried), reasons),
    )
    counted = _("{combinations:,} combinations, {candidates:,} candidates, {untried:,} untried", **asdict(counts))
    folded = Collapsed(anchor="rules", title=counted, blocks=blocks)
    notes = (Text(line) for line in repeats_text(lost_repeats(run.result)))
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
