"""The bottleneck of the best configuration, and changes that reduce it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.i18n import _
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, shown, size_text
from flagcore.report.page.blocks import (
    COLOURS,
    Block,
    Chart,
    Section,
    Text,
    cell,
    percent,
    points,
    rows_layout,
    size,
    table,
)
from flagcore.report.page.run import Record, RunData
from flagcore.report.result import Predicted, TrialResult, number
from flagcore.report.text import knob_of, value_text, values_text

MAX_CHANGES = 8
"""Maximum number of listed changes."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """The bottleneck of a candidate: its name, the key of its figure in a prediction, and its column heading."""

    name: str
    key: str
    heading: str


def improvements(run: RunData) -> Section | None:
    """Return the bottleneck of the best and changes that reduce it; None without a best or a predicted time."""
    if run.best is None or run.best.predicted.step_s is None:
        return None
    limit, knobs = _limit(run.best.predicted), run.insight.get("knobs") or []
    blocks: list[Block] = [Text(_bottleneck(run, run.best, limit))]
    if knobs:
        blocks += [_changes(run, run.best, limit), _sensitivity(run, knobs)]
    return Section(anchor="improvements", title=_("Bottleneck"), blocks=tuple(blocks))


def _limit(predicted: Predicted) -> _Limit:
    name = predicted.limit
    if name == "memory":
        return _Limit("memory", "memory.device_used_gib", _("~in use, GiB"))
    part = next((key for key in predicted.time if part_name(key) == name), None)
    return (
        _Limit(str(name), f"time.{part}", f"~{_(part_name(part))}, s") if part else _Limit("", "step_time_s.value", "")
    )


def _bottleneck(run: RunData, best: TrialResult, limit: _Limit) -> str:
    prediction = best.predicted
    if not limit.name:
        return _("Predicted: {value} {unit}.", value=shown(run.predicted(best)), unit=run.unit)
    figure, step = prediction.figure(limit.key) or 0.0, prediction.step_s or 0.0
    if limit.name == "memory":
        capacity = size_text(prediction.memory["capacity_gib"])
        return _(
            "Bottleneck: memory, ~{used} of {capacity} in use (predicted).", used=size_text(figure), capacity=capacity
        )
    return _(
        "Bottleneck: {limit}, ~{seconds} s of a step of ~{step} s, or {share:.1%} (predicted).",
        limit=_(limit.name),
        seconds=shown(figure),
        step=shown(step),
        share=figure / step,
    )


def _changes(run: RunData, best: TrialResult, limit: _Limit) -> Block:
    """Return the faster candidates that reduce the bottleneck and differ from the best in one knob."""
    step, own = (best.predicted.figure(key) or 0.0 for key in ("step_time_s.value", limit.key))
    nearest = {
        _key(value["nearest"]["candidate"]): value["nearest"]
        for knob in run.insight.get("knobs") or []
        for value in knob["values"]
        if value["value"] != knob["best"]
    }
    faster = [
        each
        for each in nearest.values()
        if _changes_one_knob(each, run)
        and each["predicted"]["step_time_s"]["value"] < step
        and (number(lookup(each["predicted"], limit.key)) or own) < own
    ]
    faster.sort(key=lambda each: (each["predicted"]["step_time_s"]["value"], lookup(each["predicted"], limit.key)))
    if not faster:
        return Text(_("Changes of one knob that help: none. No such change is predicted to be faster and to fit."))
    trials = {_key(trial.candidate): trial for trial in run.trials}
    tried = [trials[_key(each["candidate"])] for each in faster if _key(each["candidate"]) in trials]
    faster = [each for each in faster if _key(each["candidate"]) not in trials]
    if not faster:
        ran = ", ".join(f"{_('trial')} {trial.number}" for trial in tried)
        return Text(_("Changes of one knob that help: none. Those predicted to be faster ran: {trials}.", trials=ran))
    rows = []
    for each in faster[:MAX_CHANGES]:
        changed = [f"{knob_of(knob, run.knobs).title} {value_text(value)}" for knob, value in each["differs"].items()]
        predicted, seconds = each["predicted"], float(each["predicted"]["step_time_s"]["value"])
        part = number(lookup(predicted, limit.key))
        figures = [] if limit.name in ("", "memory") else [cell(part)]
        figures.append(cell(lookup(predicted, "objective.value") if run.serves else seconds))
        figures.append(percent(seconds / step - 1.0, signed=True))
        used = size(number(lookup(predicted, "memory.device_used_gib")))
        rows.append([", ".join(changed), *figures, used])
    own_heading = [] if limit.name in ("", "memory") else [limit.heading]
    seconds_heading = f"~{run.unit}" if run.serves else _("~step s")
    return table(
        _("Untried changes of one knob that are predicted to be faster"),
        [
            _("change"),
            *own_heading,
            seconds_heading,
            _("~time vs best"),
            _("~in use"),
        ],
        rows,
        sortable=True,
    )


def _changes_one_knob(change: Record, run: RunData) -> bool:
    """Return whether a candidate differs in one knob only, or also in knobs that detail this knob."""
    changed_knobs = change["differs"]
    return sum(knob_of(knob, run.knobs).part_of not in changed_knobs for knob in changed_knobs) == 1


def _key(candidate: Record) -> str:
    return repr(sorted(candidate.items()))


def _sensitivity(run: RunData, knobs: Sequence[Record]) -> Chart:
    """Return, for each value of each knob, the slowdown of the fastest predicted candidate with this value."""
    fastest_s = min(_seconds(value) for knob in knobs for value in knob["values"])
    spans = [(knob, [_seconds(value) / fastest_s - 1.0 for value in knob["values"]]) for knob in knobs]
    spans.sort(key=lambda span: -max(span[1]))
    rows: list[list[Any]] = []
    marks: dict[bool, list[tuple[str, float, str]]] = {True: [], False: []}
    for knob, slower in spans:
        name = knob_of(str(knob["knob"]), run.knobs).title
        for value, over in zip(knob["values"], slower, strict=True):
            chosen, fastest = value["value"] == knob["best"], value["fastest"]
            figure = lookup(fastest, "predicted.objective.value") if run.serves else _seconds(value)
            text = value_text(value["value"])
            row = [name, text, _("yes") if chosen else "", percent(over, signed=True), cell(figure)]
            rows.append([*row, cell(value["candidates"]), values_text(fastest["candidate"], run.knobs)])
            marks[chosen].append((name, over, f"{name} = {text}"))
    figure = f"~{run.unit}" if run.serves else _("~step s")
    headings = [_("knob"), _("value"), _("best"), _("~slower by"), figure, _("candidates that fit"), _("fastest")]
    ring = {"symbol": "square-open", "size": 17, "color": COLOURS[5], "line": {"width": 2}}
    all_marks = [*marks[True], *marks[False]]
    hover = {"text": [text for *_, text in all_marks], "hovertemplate": "%{text}: %{x:+.1%}<extra></extra>"}
    values = points(
        _("value of the knob"), 0, [over for _, over, _ in all_marks], [name for name, *_ in all_marks], **hover
    )
    best = points(_("value of the best"), 1, [over for _, over, _ in marks[True]], [name for name, *_ in marks[True]])
    return Chart(
        title=_("Influence of each knob (predicted)"),
        summary=_(
            "{knob} has the largest influence: its worst value makes the fastest candidate {share:.1%} slower. Other "
            "knobs are re-optimized for each value.",
            knob=rows[0][0],
            share=max(spans[0][1]),
        ),
        traces=(_ranges(run, spans), values, best | {"marker": ring}),
        layout=rows_layout(_("slower than the fastest"), len(spans), xaxis={"tickformat": "+.0%"}),
        table=table(
            _("The fastest predicted candidate with each value, compared to the fastest of all"),
            headings,
            rows,
            sortable=True,
        ),
    )


def _seconds(value: Record) -> float:
    return float(lookup(value["fastest"], "predicted.step_time_s.value"))


def _ranges(run: RunData, spans: Sequence[tuple[Record, Sequence[float]]]) -> dict[str, Any]:
    """Return a line per knob from its smallest to its largest figure."""
    x = [each for _, slower in spans for each in (min(slower), max(slower), None)]
    names = [knob_of(str(knob["knob"]), run.knobs).title for knob, _ in spans]
    y = [each for name in names for each in (name, name, None)]
    grey = {"color": "#888888", "width": 2}
    return {"type": "scatter", "mode": "lines", "line": grey, "x": x, "y": y, "showlegend": False, "hoverinfo": "skip"}
