"""How the best got better while trials ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.objective import is_rate
from flagcore.domain.trial import ESTIMATE
from flagcore.report.page.blocks import Cell, Chart, Section, Text, cell, table
from flagcore.report.page.charts import layout, line, points
from flagcore.report.page.run import RunData, configuration, name_of


def progress(run: RunData) -> Section | None:
    """Return the best so far over the time of all trials; None where nothing ran."""
    if run.fidelity == ESTIMATE or not run.trials:
        return None
    rows, spent, best = [], 0.0, None
    first = {trial["number"] for trial in run.trials}
    ran: dict[str, list[tuple[float, float, str]]] = {}
    failed: list[tuple[float, str]] = []
    steps: list[tuple[float, float]] = []
    for trial in run.everything:
        spent += float(trial["duration_s"])
        figure = run.figure(trial)
        if trial["number"] in first:
            if figure is not None and trial["state"] == "measured" and not _broken(trial):
                best = figure if best is None else (max if is_rate(run.objective) else min)(best, figure)
            if best is not None:
                steps.append((spent, best))
        if figure is not None:
            kind = (
                "ended early" if trial["state"] == "stopped" else "a repeat" if trial["role"] == "repeat" else "a trial"
            )
            ran.setdefault(kind, []).append((spent, figure, name_of(run, trial)))
        else:
            failed.append((spent, name_of(run, trial)))
        rows.append(
            [
                Cell(name_of(run, trial), float(trial["number"]), f"#trial-{trial['number']}"),
                configuration(trial),
                trial["state"],
                cell(float(spent)),
                cell(figure),
                cell(best),
            ]
        )
    held = table(
        f"Trials in the order in which they ran, and the best {run.unit} so far",
        ["trial", "configuration", "state", "seconds spent", run.unit, "best so far"],
        rows,
    )
    if not steps:
        return Section(anchor="progress", title="The search", blocks=(Text("Nothing was measured."), held))
    traces = [line("best first run so far", 0, *zip(*steps, strict=True))]
    traces[0]["line"] |= {"shape": "hv"}
    for series, kind in enumerate(("a trial", "a repeat", "ended early"), start=1):
        if mine := ran.get(kind):
            x, y, numbers = zip(*mine, strict=True)
            traces.append(points(kind, series, x, y, text=list(numbers)))
    if failed:
        low = min(y for mine in ran.values() for _, y, _ in mine)
        names = [name for _, name in failed]
        traces.append(points("not measured", 4, [x for x, _ in failed], [low] * len(failed), text=names))
    says = f"{len(rows):,} trials, repeats included, took {spent:,.0f} s; {_went(run, steps[0][1], steps[-1][1])}."
    if "a repeat" in ran:
        says += " The answer goes by the median of all runs of a candidate instead."
    chart = Chart(
        title="Best so far, by first runs, over the time of all trials",
        says=says,
        traces=tuple(traces),
        layout=layout("seconds of all trials together", run.unit),
        table=held,
    )
    return Section(anchor="progress", title="The search", blocks=(chart,))


def _went(run: RunData, first: float, last: float) -> str:
    """Return in words how far the best first run got."""
    start, end = cell(first).text, cell(last).text
    if start == end:
        return f"no first run was faster than the first one with a figure, {start} {run.unit}"
    return f"the best first run went from {start} to {end} {run.unit}"


def _broken(trial: Mapping[str, Any]) -> bool:
    return bool((trial["measured"] or {}).get("broken"))
