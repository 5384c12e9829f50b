"""Serving: throughput against latency with its Pareto front, limits, and distributions of latencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagcore.i18n import _
from flagcore.report import serving_text
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Chart, Section, Table, Text, cell, table
from flagcore.report.page.charts import clear_axis, layout, limit_line, line, points
from flagcore.report.page.latency_distribution import LATENCIES, distributions
from flagcore.report.page.run import RunData, configuration, number, points_of, trial_cell

RATE = "output_tokens_per_s"
FRONT = {"output tok/s": RATE, "TPOT p50 s": "tpot_s.p50", "TTFT p50 s": "ttft_s.p50", "TTFT p99 s": "ttft_s.p99"}


def serving(run: RunData) -> Section | None:
    """Return load points and latencies; None for training."""
    if not run.serves or not any(points_of(trial) for trial in run.trials):
        return None
    limits = serving_text.limits_text(run.limits)
    blocks: list[Block] = [Text(_("Latency limits: {limits}.", limits=limits) if limits else _("No latency limits."))]
    unlimited = [f"{name}.p50" for name in LATENCIES if not any(each.startswith(name) for each in run.limits)]
    for latency in (*run.limits, *unlimited):
        blocks += _against(run, latency, run.limits.get(latency))
    return Section(anchor="serving", title=_("Throughput and latency"), blocks=(*blocks, *distributions(run)))


def front_table(run: RunData) -> Table | None:
    """Return the Pareto front of throughput and latency; None for one load point."""
    if not any(len(points_of(trial)) > 1 for trial in run.trials):
        return None
    rows = [
        [str(point["trial"]), serving_text.load_text(point), *(cell(lookup(point, key)) for key in FRONT.values())]
        for point in run.result.get("front") or ()
    ]
    return table(_("Pareto front of throughput and latency"), [_("trial"), _("load"), *FRONT], rows)


def _against(run: RunData, latency: str, limit: float | None) -> Iterator[Block]:
    """Yield output tokens per second against a latency, a marker per load point."""
    measured = [
        (trial, point, x, y)
        for trial in run.trials
        for point in points_of(trial)
        if (x := number(lookup(point, latency))) is not None and (y := number(point.get(RATE))) is not None
    ]
    if not measured:
        return
    name, short = serving_text.name_of(latency), serving_text.SHORT_RATES[RATE]
    front = _front([(x, y) for _, _, x, y in measured])
    rows = []
    for trial, point, x, y in measured:
        within = [] if limit is None else [cell(x <= limit)]
        first = [trial_cell(run, trial), configuration(run, trial), serving_text.load_text(point)]
        rows.append([*first, cell(y), cell(x), cell((x, y) in front), *within])
    headings = [_("trial"), _("configuration"), _("load"), short, f"{name}, s", _("Pareto-optimal")]
    data = table(
        _("Load points by {rate} and {latency}", rate=short, latency=name),
        [*headings, *([_("within {limit:g} s", limit=limit)] if limit is not None else [])],
        rows,
        sortable=True,
    )
    traces = []
    if len(front) > 1:
        traces.append(line(_("Pareto front"), 3, [x for x, _ in front], [y for _, y in front]))
        traces[0]["line"] |= {"shape": "hv"}
    best = run.best["number"] if run.best else None
    for series, group, size in ((0, _("others"), 9), (1, _("best"), 14)):
        members = [each for each in measured if (each[0]["number"] == best) == (series == 1)]
        if members:
            text = [
                f"{_('trial')} {trial['number']}: {serving_text.load_text(point)}" for trial, point, _x, _y in members
            ]
            trace = points(group, series, [x for *_, x, _ in members], [y for *_, y in members], text=text)
            traces.append(trace | {"marker": {**trace["marker"], "size": size}})
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
    limits = [] if limit is None else [limit]
    yield Chart(
        title=_("{rate} against {latency}", rate=short, latency=name),
        summary=summary,
        traces=tuple(traces),
        layout=layout(
            f"{name}, s",
            short,
            shapes=[limit_line(_("limit {seconds:g} s", seconds=each), each) for each in limits],
            xaxis=clear_axis([*(x for *_, x, _ in measured), *limits]),
        ),
        table=data,
    )


def _front(all_points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    front: list[tuple[float, float]] = []
    for x, y in sorted(all_points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front
