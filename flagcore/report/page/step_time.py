"""The parts of the step time."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from flagcore.i18n import N_, _
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Chart, Section, cell, percent, table
from flagcore.report.page.charts import bars, points, rows_layout
from flagcore.report.page.run import RunData, number

MEASURED = {"forward_backward_s": N_("forward and backward, s"), "optimizer_s": N_("optimizer, s")}
"""The parts of a step that the trial program measures on its first rank."""


def step_time(run: RunData) -> Section | None:
    """Return the parts of the step time; None without a prediction."""
    trials = {"best": run.best, "baseline": run.baseline}
    if run.best and run.baseline and run.best["candidate"] == run.baseline["candidate"]:
        trials.pop("baseline")
    predicted = {name: parts for name, trial in trials.items() if trial and (parts := _parts(trial))}
    if not predicted:
        return None
    blocks: list[Block] = [_by_part(run, predicted, {name: trial for name, trial in trials.items() if trial})]
    measured = [[_(name), *_measured(run, trial)] for name, trial in trials.items() if trial and _measured(run, trial)]
    if measured:
        headings = [_("trial"), *(_(text) for text in MEASURED.values()), _("step, s")]
        blocks.append(table(_("Measured by the trial program, median over steps"), headings, measured))
    return Section(anchor="step", title=_("Step time"), blocks=tuple(blocks))


def _parts(trial: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(seconds) for name, seconds in (trial["predicted"].get("time") or {}).items()}


def _by_part(
    run: RunData, predicted: Mapping[str, Mapping[str, float]], trials: Mapping[str, Mapping[str, Any]]
) -> Chart:
    names = list(dict.fromkeys(name for parts in predicted.values() for name in parts))
    labels = [_(name) for name in predicted]
    traces = [
        bars(_(part_name(name)), place, [parts.get(name, 0.0) for parts in predicted.values()], labels, width=0.5)
        for place, name in enumerate(names)
        if any(parts.get(name) for parts in predicted.values())
    ]
    steps = {name: number(lookup(trials[name], "measured.step_time_s.median")) for name in predicted}
    if any(step is not None for step in steps.values()):
        there = [(step, _(name)) for name, step in steps.items() if step is not None]
        trace = points(_("measured step"), 5, [step for step, _ in there], [name for _, name in there])
        traces.append(trace | {"marker": {**trace["marker"], "symbol": "star", "size": 13}})
    totals = {name: sum(parts.values()) for name, parts in predicted.items()}
    rows: list[list[Any]] = []
    for part in names:
        figures = [(predicted[name].get(part, 0.0), totals[name]) for name in predicted]
        shares = [
            each for seconds, total in figures for each in (cell(seconds), percent(seconds / total if total else 0))
        ]
        rows.append([_(part_name(part)), *shares])
    rows.append([_("step, predicted"), *(each for name in predicted for each in (cell(totals[name]), cell(None)))])
    rows.append([_("step, measured"), *(each for name in predicted for each in (cell(steps[name]), cell(None)))])
    data = table(
        _("Parts of the step time (predicted)"),
        [_("part"), *(heading for name in labels for heading in (f"~{name}, s", "~%"))],
        rows,
    )
    first = next(iter(predicted))
    most = max(predicted[first], key=lambda part: predicted[first][part])
    return Chart(
        title=_("Parts of the step time (predicted)"),
        summary=_(
            "{name}: {part} takes {share:.1%} of a step of ~{seconds} s.",
            name=_(first).capitalize(),
            part=_(part_name(most)),
            share=predicted[first][most] / (totals[first] or 1.0),
            seconds=shown(totals[first]),
        ),
        traces=tuple(traces),
        layout=rows_layout(_("seconds"), len(predicted), each=60, barmode="stack")
        | {"height": 240 + 50 * len(predicted)},
        table=data,
    )


def _measured(run: RunData, trial: Mapping[str, Any]) -> list[Any]:
    """Return the medians of the measured parts of a step, over the steps after warm-up; empty without them."""
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
