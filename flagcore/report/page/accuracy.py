"""Predicted against measured, and learning during the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.objective import objective_value
from flagcore.i18n import _
from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Block, Cell, Chart, Section, cell, percent, table
from flagcore.report.page.charts import layout, line, points, spread_axis
from flagcore.report.page.run import RunData, configuration, name_of, number
from flagcore.report.plan_text import far


def accuracy(run: RunData) -> Section | None:
    """Return the errors of predictions; None if no trial is both predicted and measured."""
    pairs = [(trial, both) for trial in run.trials if (both := _both(run, trial)) is not None]
    if not pairs:
        return None
    blocks: list[Block] = [_scatter(run, pairs)]
    learned = _learned(run)
    if learned is not None:
        blocks.append(learned)
    return Section(anchor="accuracy", title=_("Predicted against measured"), blocks=tuple(blocks))


def _both(run: RunData, trial: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    """Return the measured figure of a trial, and the predicted one with its interval."""
    measured = trial["measured"]
    if not measured:
        return None
    key = "objective" if run.serves else "step_time_s"
    predicted = [number(lookup(trial["predicted"], f"{key}.{name}")) for name in ("value", "low", "high")]
    if None in predicted:
        return None
    seconds = float(measured["step_time_s"]["median"])
    value, low, high = (each or 0.0 for each in predicted)
    return (objective_value(run.objective, seconds) if run.serves else seconds, value, low, high)


def _scatter(run: RunData, pairs: list[tuple[Mapping[str, Any], tuple[float, float, float, float]]]) -> Chart:
    unit = run.unit if run.serves else _("s/step")
    rows = []
    for trial, (measured, value, low, high) in pairs:
        inside = low <= measured <= high
        figures = [cell(each) for each in (measured, value, low, high)]
        over = percent(measured / value - 1.0 if value else None, signed=True)
        rows.append(
            [
                Cell(name_of(run, trial), float(trial["number"])),
                configuration(run, trial),
                *figures,
                over,
                _("inside") if inside else _("outside"),
            ]
        )
    headings = [_("trial"), _("configuration"), _("measured"), _("~predicted"), _("~low"), _("~high"), _("error")]
    data = table(
        _("Measured and predicted {unit}, with 80% intervals", unit=unit),
        [*headings, _("80% interval")],
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
    hits = sum(low <= measured <= high for measured, value, low, high in (both for trial, both in pairs))
    kind = spread_axis(values)
    return Chart(
        title=_("Predicted against measured"),
        summary=_("{count} of {total} measurements are inside the 80% interval.", count=hits, total=len(rows)),
        traces=(
            line(_("predicted = measured"), 2, ends, ends),
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


def _learned(run: RunData) -> Chart | None:
    """Return the errors of predictions before and after learning, per trial."""
    errors = run.result.get("predictions_off")
    pairs = [
        (trial, float(over["predicted"]), float(over["believed"]))
        for trial in run.trials
        if (over := trial["measured_over"])["predicted"] and over["believed"]
    ]
    if not errors or not pairs:
        return None
    summary = _(
        "The median error of predictions over {count} trials is {before}, and {after} after learning.",
        count=errors["trials"],
        before=far(errors["before"]),
        after=far(errors["after"]),
    )
    rows = [
        [
            Cell(name_of(run, trial), float(trial["number"])),
            percent(before - 1.0, signed=True),
            percent(after - 1.0, signed=True),
        ]
        for trial, before, after in pairs
    ]
    data = table(
        _("Relative error of the step time: measured / predicted - 1"),
        [_("trial"), _("first prediction"), _("after learning")],
        rows,
    )
    numbers = [str(trial["number"]) for trial, _, _ in pairs]
    return Chart(
        title=_("Learning during the run"),
        summary=summary,
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
        table=data,
    )
