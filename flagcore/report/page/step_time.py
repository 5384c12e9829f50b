"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from flagcore.report.explanation import PARTS
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Chart, Section, cell, percent, table
from flagcore.report.page.charts import bars, points, rows_layout
from flagcore.report.page.run import RunData, number

MEASURED = {"forward_backward_s": "forward and backward", "optimizer_s": "optimizer"}
"""What the trial program measures of a step, of its first rank."""


def step_time(run: RunData) -> Section | None:
    """Return the parts of a step; None where none is known."""
    trials = {"best": run.best, "baseline": run.baseline}
    if run.best and run.baseline and run.best["candidate"] == run.baseline["candidate"]:
        trials.pop("baseline")
    known = {name: parts for name, trial in trials.items() if trial and (parts := _parts(trial))}
    if not known:
        return None
    blocks: list[Block] = [_by_part(run, known, {name: trial for name, trial in trials.items() if trial})]
    measured = [[name, *_measured(run, trial)] for name, trial in trials.items() if trial and _measured(run, trial)]
    if measured:
        headings = ["what ran", *(f"{text}, s" for text in MEASURED.values()), "step, s"]
        blocks.append(table("Measured by the trial program, median over the steps that count", headings, measured))
    return Section(anchor="step", title="Time of a step", blocks=tuple(blocks))


def _parts(trial: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(seconds) for name, seconds in (trial["predicted"].get("time") or {}).items()}


def _by_part(run: RunData, known: Mapping[str, Mapping[str, float]], trials: Mapping[str, Mapping[str, Any]]) -> Chart:
    names = list(dict.fromkeys(name for parts in known.values() for name in parts))
    traces = [
        bars(PARTS.get(name, name), place, [parts.get(name, 0.0) for parts in known.values()], list(known), width=0.5)
        for place, name in enumerate(names)
        if any(parts.get(name) for parts in known.values())
    ]
    steps = {name: number(lookup(trials[name], "measured.step_time_s.median")) for name in known}
    if any(step is not None for step in steps.values()):
        there = [(step, name) for name, step in steps.items() if step is not None]
        trace = points("the step as measured", 5, [step for step, _ in there], [name for _, name in there])
        traces.append(trace | {"marker": {**trace["marker"], "symbol": "star", "size": 13}})
    totals = {name: sum(parts.values()) for name, parts in known.items()}
    rows: list[list[Any]] = []
    for part in names:
        figures = [(known[name].get(part, 0.0), totals[name]) for name in known]
        shares = [
            each for seconds, total in figures for each in (cell(seconds), percent(seconds / total if total else 0))
        ]
        rows.append([PARTS.get(part, part), *shares])
    rows.append(["step, predicted", *(each for name in known for each in (cell(totals[name]), cell(None)))])
    rows.append(["step, measured", *(each for name in known for each in (cell(steps[name]), cell(None)))])
    held = table(
        "Seconds of a step by part, as predicted",
        ["part", *(heading for name in known for heading in (f"~{name}, s", f"~{name}, share"))],
        rows,
    )
    first = next(iter(known))
    most = max(known[first], key=lambda part: known[first][part])
    return Chart(
        title="What a step is predicted to be spent on",
        says=f"Of the {first}'s predicted {shown(totals[first])} s a step, {PARTS.get(most, most)} takes "
        f"{known[first][most] / (totals[first] or 1.0):.1%}.",
        traces=tuple(traces),
        layout=rows_layout("seconds", len(known), each=60, barmode="stack") | {"height": 240 + 50 * len(known)},
        table=held,
    )


def _measured(run: RunData, trial: Mapping[str, Any]) -> list[Any]:
    """Return the medians of what a trial's program measured over the steps that count; nothing without it."""
    count = lookup(trial, "measured.step_time_s.n")
    steps = run.metrics(trial).get("steps")
    if not count or not isinstance(steps, list) or trial["fidelity"] != "run":
        return []
    kept = [step for step in steps if isinstance(step, Mapping)][-count:]
    figures = [[number(step.get(key)) for step in kept] for key in MEASURED]
    if not kept or any(None in values for values in figures):
        return []
    medians = [cell(median(value for value in values if value is not None)) for values in figures]
    return [*medians, cell(number(lookup(trial, "measured.step_time_s.median")))]
