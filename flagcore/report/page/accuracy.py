"""Predicted against measured, and how the model learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.objective import told
from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Block, Cell, Chart, Section, cell, percent, table
from flagcore.report.page.charts import layout, line, points, spread_axis
from flagcore.report.page.run import RunData, configuration, name_of, number
from flagcore.report.text import far


def accuracy(run: RunData) -> Section | None:
    """Return how far predictions were off; None where nothing was both predicted and measured."""
    pairs = [(trial, both) for trial in run.trials if (both := _both(run, trial)) is not None]
    if not pairs:
        return None
    blocks: list[Block] = [_scatter(run, pairs)]
    learned = _learned(run)
    if learned is not None:
        blocks.append(learned)
    return Section(anchor="accuracy", title="Predicted against measured", blocks=tuple(blocks))


def _both(run: RunData, trial: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    """Return a trial's figure as measured and as predicted, with the interval of that."""
    measured = trial["measured"]
    if not measured:
        return None
    key = "objective" if run.serves else "step_time_s"
    predicted = [number(lookup(trial["predicted"], f"{key}.{name}")) for name in ("value", "low", "high")]
    if None in predicted:
        return None
    seconds = float(measured["step_time_s"]["median"])
    value, low, high = (each or 0.0 for each in predicted)
    return (told(run.objective, seconds) if run.serves else seconds, value, low, high)


def _scatter(run: RunData, pairs: list[tuple[Mapping[str, Any], tuple[float, float, float, float]]]) -> Chart:
    unit = run.unit if run.serves else "s a step"
    rows = []
    for trial, (measured, value, low, high) in pairs:
        inside = "inside" if low <= measured <= high else "outside"
        figures = [cell(each) for each in (measured, value, low, high)]
        over = percent(measured / value - 1.0 if value else None, signed=True)
        rows.append([Cell(name_of(run, trial), float(trial["number"])), configuration(trial), *figures, over, inside])
    held = table(
        f"Measured and predicted {unit}; the interval is an 80% one",
        ["trial", "configuration", "measured", "~predicted", "~low", "~high", "measured over predicted", "interval"],
        rows,
        sortable=True,
    )
    values = [each for _, both in pairs for each in both]
    ends = [min(values), max(values)]
    x, y = [both[0] for _, both in pairs], [both[1] for _, both in pairs]
    errors = {
        "type": "data",
        "symmetric": False,
        "array": [both[3] - both[1] for _, both in pairs],
        "arrayminus": [both[1] - both[2] for _, both in pairs],
        "thickness": 1,
        "width": 4,
    }
    kept = sum(row[-1] == "inside" for row in rows)
    kind = spread_axis(values)
    return Chart(
        title="Predicted before anything ran, against measured",
        says=f"{kept} of {len(rows)} measured figures lie inside their 80% interval.",
        traces=(
            line("as predicted", 2, ends, ends),
            points(
                "a trial, with its 80% interval",
                0,
                x,
                y,
                error_y=errors,
                text=[name_of(run, each) for each, _ in pairs],
            ),
        ),
        layout=layout(f"measured {unit}", f"predicted {unit}", height=430, xaxis=dict(kind), yaxis=dict(kind)),
        table=held,
    )


def _learned(run: RunData) -> Chart | None:
    """Return how far predictions were off before and after learning, a trial at a time."""
    known = run.result.get("predictions_off")
    pairs = [
        (trial, float(over["predicted"]), float(over["believed"]))
        for trial in run.trials
        if (over := trial["measured_over"])["predicted"] and over["believed"]
    ]
    if not known or not pairs:
        return None
    says = (
        f"Over {known['trials']} trials predictions were off by {far(known['before'])} in the median, and by "
        f"{far(known['after'])} after learning from the trials before."
    )
    rows = [
        [
            Cell(name_of(run, trial), float(trial["number"])),
            percent(before - 1.0, signed=True),
            percent(after - 1.0, signed=True),
        ]
        for trial, before, after in pairs
    ]
    held = table(
        "Measured step time over what was expected, less one",
        ["trial", "over the first prediction", "over what was believed by then"],
        rows,
    )
    numbers = [str(trial["number"]) for trial, _, _ in pairs]
    return Chart(
        title="How the model learned",
        says=says,
        traces=(
            line("no error", 6, numbers, [0.0] * len(pairs), line={"color": "#888888", "width": 1, "dash": "dot"}),
            points("first prediction", 1, numbers, [before - 1.0 for _, before, _ in pairs], mode="lines+markers"),
            points("believed by then", 0, numbers, [after - 1.0 for _, _, after in pairs], mode="lines+markers"),
        ),
        layout=layout(
            "trial", "measured over expected", xaxis={"type": "category"}, yaxis={"tickformat": "+.0%"}, height=340
        ),
        table=held,
    )
