"""The influence of each knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.i18n import _
from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Chart, cell, percent, table
from flagcore.report.page.charts import COLOURS, points, rows_layout
from flagcore.report.page.run import RunData
from flagcore.report.text import knob_of, values_text


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a knob: by which share the fastest candidate with it is slower than the fastest of all."""

    knob: str
    text: str
    slower: float
    chosen: bool
    data: Mapping[str, Any]


def sensitivity(run: RunData, knobs: Sequence[Mapping[str, Any]]) -> Chart:
    """Return, for each value of each knob, how much slower the fastest predicted candidate with it is."""
    least = min(_seconds(value) for knob in knobs for value in knob["values"])
    spans = [[_value(run, knob, value, least) for value in knob["values"]] for knob in knobs]
    spans.sort(key=lambda values: -max(value.slower for value in values))
    every = [value for values in spans for value in values]
    rows = [
        [
            value.knob,
            value.text,
            _("yes") if value.chosen else "",
            percent(value.slower, signed=True),
            cell(lookup(value.data["fastest"], "predicted.objective.value") if run.serves else _seconds(value.data)),
            cell(value.data["candidates"]),
            values_text(value.data["fastest"]["candidate"], run.knobs),
        ]
        for value in every
    ]
    figure = f"~{run.unit}" if run.serves else _("~step, s")
    headings = [_("knob"), _("value"), _("best"), _("~slower by"), figure, _("candidates that fit"), _("fastest")]
    data = table(
        _("The fastest predicted candidate with each value, compared to the fastest of all"),
        headings,
        rows,
        sortable=True,
    )
    names = [value.knob for value in every]
    text = [f"{value.knob} = {value.text}" for value in every]
    chosen = [value for value in every if value.chosen]
    ring = {"symbol": "square-open", "size": 17, "color": COLOURS[5], "line": {"width": 2}}
    most = spans[0][0].knob, max(value.slower for value in spans[0])
    return Chart(
        title=_("Influence of each knob (predicted)"),
        summary=_(
            "{knob} has the largest influence: its worst value makes the fastest candidate {share:.1%} slower. Other "
            "knobs are re-optimized for each value.",
            knob=most[0],
            share=most[1],
        ),
        traces=(
            _ranges(spans),
            points(
                _("value of the knob"),
                0,
                [value.slower for value in every],
                names,
                text=text,
                hovertemplate="%{text}: %{x:+.1%}<extra></extra>",
            ),
            points(_("value of the best"), 1, [value.slower for value in chosen], [value.knob for value in chosen])
            | {"marker": ring},
        ),
        layout=rows_layout(_("slower than the fastest"), len(spans), xaxis={"tickformat": "+.0%"}),
        table=data,
    )


def value_text(value: object) -> str:
    """Return the value of a knob as text."""
    if value is None:
        return _("unset")
    return (_("on") if value else _("off")) if isinstance(value, bool) else str(value)


def _value(run: RunData, knob: Mapping[str, Any], value: Mapping[str, Any], least: float) -> _Value:
    name = knob_of(str(knob["knob"]), run.knobs).title
    slower = _seconds(value) / least - 1.0
    return _Value(name, value_text(value["value"]), slower, value["value"] == knob["best"], value)


def _seconds(value: Mapping[str, Any]) -> float:
    return float(lookup(value["fastest"], "predicted.step_time_s.value"))


def _ranges(spans: Sequence[Sequence[_Value]]) -> dict[str, Any]:
    """Return a line per knob from its least to its largest figure."""
    x: list[float | None] = []
    y: list[str | None] = []
    for values in spans:
        slower = [value.slower for value in values]
        x += [min(slower), max(slower), None]
        y += [values[0].knob, values[0].knob, None]
    grey = {"color": "#888888", "width": 2}
    return {"type": "scatter", "mode": "lines", "line": grey, "x": x, "y": y, "showlegend": False, "hoverinfo": "skip"}
