"""How much each knob matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Chart, cell, percent, table
from flagcore.report.page.charts import COLOURS, points, rows_layout
from flagcore.report.page.run import RunData
from flagcore.report.text import SHORT, values_text


@dataclass(frozen=True, slots=True)
class _Value:
    """One value of one knob: how much longer than the fastest of all the fastest with it takes."""

    knob: str
    text: str
    longer: float
    chosen: bool
    data: Mapping[str, Any]


def sensitivity(run: RunData, knobs: Sequence[Mapping[str, Any]]) -> Chart:
    """Return, for each value of each knob, how much slower the fastest predicted candidate with it is."""
    least = min(_seconds(value) for knob in knobs for value in knob["values"])
    spans = [[_told(knob, value, least) for value in knob["values"]] for knob in knobs]
    spans.sort(key=lambda values: -max(value.longer for value in values))
    every = [value for values in spans for value in values]
    rows = [
        [
            value.knob,
            value.text,
            "yes" if value.chosen else "",
            percent(value.longer, signed=True),
            cell(lookup(value.data["fastest"], "predicted.objective.value") if run.serves else _seconds(value.data)),
            cell(value.data["candidates"]),
            values_text(value.data["fastest"]["candidate"]),
        ]
        for value in every
    ]
    figure = f"~{run.unit}" if run.serves else "~step, s"
    held = table(
        "The fastest predicted candidate with each value, against the fastest of all that are predicted to fit",
        ["knob", "value", "the best has it", "~longer by", figure, "candidates that fit", "the fastest with it"],
        rows,
        sortable=True,
    )
    names = [value.knob for value in every]
    text = [f"{value.knob} = {value.text}" for value in every]
    mine = [value for value in every if value.chosen]
    ring = {"symbol": "square-open", "size": 17, "color": COLOURS[5], "line": {"width": 2}}
    most = spans[0][0].knob, max(value.longer for value in spans[0])
    return Chart(
        title="How much each knob matters, as predicted",
        says=f"{most[0]} matters most: with its worst value even the fastest candidate takes {most[1]:.1%} longer. For "
        "each value the other knobs are chosen anew.",
        traces=(
            _ranges(spans),
            points(
                "a value of the knob",
                0,
                [value.longer for value in every],
                names,
                text=text,
                hovertemplate="%{text}: %{x:+.1%}<extra></extra>",
            ),
            points("what the best has", 1, [value.longer for value in mine], [value.knob for value in mine])
            | {"marker": ring},
        ),
        layout=rows_layout("longer than the fastest", len(spans), xaxis={"tickformat": "+.0%"}),
        table=held,
    )


def value_text(value: object) -> str:
    """Return a knob's value in a word."""
    if value is None:
        return "not set"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _told(knob: Mapping[str, Any], value: Mapping[str, Any], least: float) -> _Value:
    name = SHORT.get(knob["knob"], str(knob["knob"]))
    longer = _seconds(value) / least - 1.0
    return _Value(name, value_text(value["value"]), longer, value["value"] == knob["best"], value)


def _seconds(value: Mapping[str, Any]) -> float:
    return float(lookup(value["fastest"], "predicted.step_time_s.value"))


def _ranges(spans: Sequence[Sequence[_Value]]) -> dict[str, Any]:
    """Return a line for each knob from its least to its largest figure."""
    x: list[float | None] = []
    y: list[str | None] = []
    for values in spans:
        longer = [value.longer for value in values]
        x += [min(longer), max(longer), None]
        y += [values[0].knob, values[0].knob, None]
    grey = {"color": "#888888", "width": 2}
    return {"type": "scatter", "mode": "lines", "line": grey, "x": x, "y": y, "showlegend": False, "hoverinfo": "skip"}
