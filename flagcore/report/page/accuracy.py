"""Predicted against measured, and learning during the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.domain.objective import objective_value
from flagcore.i18n import _, ngettext
from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Chart, Section, cell, percent, table
from flagcore.report.page.charts import layout, line, points, spread_axis
from flagcore.report.page.run import MAX_LISTED, RunData, configuration, listed, name_of, number, seconds_of, trial_cell


def accuracy(run: RunData) -> Section | None:
    """Return the errors of predictions; None if no trial is both predicted and measured."""
    pairs = [(trial, both) for trial in run.trials if (both := _measured_and_predicted(run, trial)) is not None]
    if not pairs:
        return None
    blocks = (_scatter(run, pairs), learning(run))
    return Section(anchor="accuracy", title=_("Predictions"), blocks=tuple(filter(None, blocks)))


def _measured_and_predicted(run: RunData, trial: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return the measured figure of a trial, and the predicted figure with its interval."""
    key = "objective" if run.serves else "step_time_s"
    prediction = [number(lookup(trial["predicted"], f"{key}.{name}")) for name in ("value", "low", "high")]
    seconds = seconds_of(trial) if trial["measured"] else None
    if seconds is None or None in prediction:
        return None
    return (objective_value(run.objective, seconds) if run.serves else seconds, *(each or 0.0 for each in prediction))


def _scatter(run: RunData, pairs: list[tuple[Mapping[str, Any], tuple[float, ...]]]) -> Chart:
    unit = run.unit if run.serves else _("s/step")
    rows, shown_numbers = [], listed(run)
    for trial, (measured, value, low, high) in (pair for pair in pairs if pair[0]["number"] in shown_numbers):
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
    errors = run.result.get("predictions_off")
    pairs = [
        (trial, float(over["predicted"]), float(over["believed"]))
        for trial in run.trials
        if (over := trial["measured_over"])["predicted"] and over["believed"]
    ]
    if not errors or not pairs:
        return None
    rows, shown_numbers = [], listed(run)
    for trial, before, after in (pair for pair in pairs if pair[0]["number"] in shown_numbers):
        step = float(trial["measured"]["step_time_s"]["median"])
        seconds = [step / before, step / after, step]
        figures = [objective_value(run.objective, each) for each in seconds] if run.serves else seconds
        shares = [percent(each - 1.0, signed=True) for each in (before, after)]
        rows.append([cell(trial["number"]), *map(cell, figures), *shares])
    heading = run.unit if run.serves else _("step s")
    headings = [_("trial"), f"~{heading}", _("~learned"), heading, _("error"), _("after learning")]
    numbers = [str(trial["number"]) for trial, _, _ in pairs]
    return Chart(
        title=_("Learning during the run"),
        summary=ngettext(
            "Median prediction error over {count} trial: {before}, after learning {after}.",
            "Median prediction error over {count} trials: {before}, after learning {after}.",
            errors["trials"],
            before=_error_text(errors["before"]),
            after=_error_text(errors["after"]),
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
