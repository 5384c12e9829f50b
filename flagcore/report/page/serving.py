"""Serving: throughput against latency with its Pareto front, limits, and distributions of latencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flagcore.i18n import _
from flagcore.report import serving_text
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Cell, Chart, Section, Text, cell, table
from flagcore.report.page.charts import clear_axis, layout, limit_line, line, points
from flagcore.report.page.latency_distribution import LATENCIES, distributions
from flagcore.report.page.run import RunData, configuration, name_of, number

RATE = "output_tokens_per_s"


def serving(run: RunData) -> Section | None:
    """Return load points and latencies; None for training."""
    if not run.serves:
        return None
    points_of = [(trial, point) for trial in run.trials for point in (trial["measured"] or {}).get("points") or []]
    if not points_of:
        return None
    limits: Mapping[str, float] = run.result.get("limits") or {}
    text = (
        _("Latency limits: {limits}.", limits=serving_text.limits_text(limits)) if limits else _("No latency limits.")
    )
    blocks: list[Block] = [Text(text)]
    for latency in _wanted(limits):
        blocks += _against(run, points_of, latency, limits.get(latency))
    blocks += distributions(run, limits)
    return Section(anchor="serving", title=_("Throughput and latency"), blocks=tuple(blocks))


def _wanted(limits: Mapping[str, float]) -> list[str]:
    """Return the latencies to chart: those with a limit, else their median."""
    wanted = list(limits)
    wanted += [f"{name}.p50" for name in LATENCIES if not any(each.startswith(name) for each in limits)]
    return wanted


def _against(
    run: RunData, every: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], latency: str, limit: float | None
) -> Iterator[Block]:
    """Yield output tokens per second against a latency, a marker per load point."""
    measured = [
        (trial, point, float(x), float(y))
        for trial, point in every
        if (x := number(lookup(point, latency))) is not None and (y := number(point.get(RATE))) is not None
    ]
    if not measured:
        return
    name, short = serving_text.name_of(latency), serving_text.SHORT_RATES[RATE]
    front = _front([(x, y) for _, _, x, y in measured])
    rows = []
    for trial, point, x, y in measured:
        within = [] if limit is None else [_("yes") if x <= limit else _("no")]
        optimal = _("yes") if (x, y) in front else _("no")
        link = f"#trial-{trial['number']}"
        row = [
            Cell(name_of(run, trial), float(trial["number"]), link),
            configuration(run, trial),
            serving_text.load_text(point),
        ]
        rows.append([*row, cell(y), cell(x), optimal, *within])
    headings = [_("trial"), _("configuration"), _("load"), short, f"{name}, s", _("Pareto-optimal")]
    data = table(
        _("Load points by {rate} and {latency}", rate=short, latency=name),
        [*headings, *([_("within {limit:g} s", limit=limit)] if limit is not None else [])],
        rows,
        sortable=True,
    )
    best = run.best["number"] if run.best else None
    groups = [
        (_("others"), 0, 9, [each for each in measured if each[0]["number"] != best]),
        (_("best"), 1, 14, [each for each in measured if each[0]["number"] == best]),
    ]
    traces = []
    if len(front) > 1:
        traces.append(line(_("Pareto front"), 3, [x for x, _ in front], [y for _, y in front]))
        traces[0]["line"] |= {"shape": "hv"}
    for group, series, size, group_points in groups:
        if group_points:
            text = [
                f"{_('trial')} {trial['number']}: {serving_text.load_text(point)}" for trial, point, *xy in group_points
            ]
            trace = points(group, series, [x for *_, x, _ in group_points], [y for *_, y in group_points], text=text)
            traces.append(trace | {"marker": {**trace["marker"], "size": size}})
    shapes: list[Any] = []
    x_values = [x for *_, x, _ in measured]
    if limit is not None:
        shapes = [limit_line(_("limit {seconds:g} s", seconds=limit), limit)]
        x_values.append(limit)
    top = max(measured, key=lambda each: each[3])
    summary = _(
        "{count} of {total} load points are Pareto-optimal; the maximum is {rate} {unit} at {seconds} s {latency}.",
        count=len(front),
        total=len(measured),
        rate=shown(top[3]),
        unit=short,
        seconds=shown(top[2]),
        latency=name,
    )
    yield Chart(
        title=_("{rate} against {latency}", rate=short, latency=name),
        summary=summary,
        traces=tuple(traces),
        layout=layout(f"{name}, s", short, shapes=shapes, xaxis=clear_axis(x_values)),
        table=data,
    )


def _front(all_points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    front: list[tuple[float, float]] = []
    for x, y in sorted(all_points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front
