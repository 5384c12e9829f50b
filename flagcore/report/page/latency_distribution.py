"""How TTFT and TPOT spread over the requests of the best and of the baseline, in each of their runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flagcore.domain.serving import STATISTICS
from flagcore.report import serving_text
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Cell, Chart, Table, Text, cell, table
from flagcore.report.page.charts import clear_axis, layout, limit_line, line, points, rows_layout
from flagcore.report.page.run import RunData, name_of, number

LATENCIES = ("ttft_s", "tpot_s")
NOT_KEPT = (
    "Of the latencies of single requests no more was kept than these statistics: another client was the judge, the run "
    "is of an earlier version, or the folders of its trials are gone. So no distribution is drawn."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """A trial of the best's or the baseline's configuration; `who` is what it is called, `again` that it is a repeat.

    `values` are quantiles of one latency, seconds from the least to the greatest, a list for each time the load ran.
    """

    who: str
    again: bool
    trial: Mapping[str, Any]
    point: Mapping[str, Any]
    values: tuple[tuple[float, ...], ...]


def spread(run: RunData, limits: Mapping[str, float]) -> Iterator[Block]:
    """Yield how each latency spreads over requests: as far as it was kept, else by its statistics, which is said."""
    said = False
    for latency in LATENCIES:
        held = _statistics(run, latency)
        if not held.rows:
            continue
        known = [each for each in _known(run, latency) if each.values]
        if known:
            yield _distribution(run, latency, known, limits, held)
            continue
        if not said:
            yield Text(NOT_KEPT)
        said = True
        yield _dots(latency, held)


def _trials(run: RunData) -> Iterator[tuple[str, bool, Mapping[str, Any]]]:
    """Yield the best and the baseline, each with its repeats after it; the baseline once where it is the best.

    Where no trial keeps the limits, the nearest to them stands for the best.
    """
    seen: list[Any] = []
    first = ("best", run.best) if run.best else ("nearest", run.nearest)
    for who, trial in (first, ("baseline", run.baseline)):
        if not trial or not trial["measured"] or trial["candidate"] in seen:
            continue
        seen.append(trial["candidate"])
        for each in run.runs(trial):
            if each["measured"]:
                yield who, each is not trial, each


def _points(trial: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [point for point in (trial["measured"] or {}).get("points") or [] if isinstance(point, Mapping)]


def _known(run: RunData, latency: str) -> Iterator[_Ran]:
    """Yield what was kept of the load point that the best is told by."""
    place = _told(run.best or run.nearest)
    for who, again, trial in _trials(run):
        points_of = _points(trial)
        if place < len(points_of):
            values = tuple(_quantiles(run, trial, place, latency))
            yield _Ran(who=who, again=again, trial=trial, point=points_of[place], values=values)


def _told(best: Mapping[str, Any] | None) -> int:
    """Return the place of the load point whose figures are those of the measurement."""
    figures = lookup(best or {}, "measured.figures") or {}
    keys = ("output_tokens_per_s", "e2e_s", "ttft_s")
    for place, point in enumerate(_points(best) if best else ()):
        if all(point.get(key) == figures.get(key) for key in keys):
            return place
    return 0


def _quantiles(run: RunData, trial: Mapping[str, Any], place: int, latency: str) -> Iterator[tuple[float, ...]]:
    """Yield the quantiles that a trial's program wrote; what is not as it writes them is left out."""
    try:
        repeats = run.metrics(trial)["points"][place]["repeats"]
        found = [repeat["quantiles"][latency] for repeat in repeats]
    except (LookupError, TypeError):
        return
    for values in found:
        if not isinstance(values, list) or not values or not all(isinstance(each, (int, float)) for each in values):
            continue
        if all(math.isfinite(each) and each >= 0 for each in values) and all(a <= b for a, b in pairwise(values)):
            yield tuple(float(each) for each in values)


def _distribution(run: RunData, latency: str, known: Sequence[_Ran], limits: Mapping[str, float], held: Table) -> Chart:
    short = serving_text.SHORT_LATENCIES[latency]
    mine = {name: limit for name, limit in limits.items() if name.partition(".")[0] == latency}
    traces: list[dict[str, Any]] = []
    for series, again in ((0, False), (2, True), (1, False), (3, True)):
        ran = [each for each in known if (each.who == "baseline", each.again) == (series % 2 == 1, again)]
        if ran:
            width = 1.5 if again else 3
            trace = line(_called(ran), series, *_curves([values for each in ran for values in each.values]))
            trace["line"] = {**trace["line"], "width": width}
            traces.append(trace)
    for series, each in enumerate(one for one in known if not one.again):
        marks = [(number(lookup(each.point, f"{latency}.{name}")), _share(name)) for name in STATISTICS[1:]]
        there = [(x, y) for x, y in marks if x is not None]
        name = f"its p50, p90 and p99 ({each.who})"
        traces.append(points(name, series, [x for x, _ in there], [y for _, y in there]))
    values = [float(x) for trace in traces for x in trace["x"] if x is not None]
    shapes = []
    for name, limit in mine.items():
        values.append(limit)
        shapes.append(limit_line(f"limit: {serving_text.name_of(name)} {limit:g} s", limit))
    load = serving_text.load_text(known[0].point)
    return Chart(
        title=f"How {short} spreads over requests" + (f", {load}" if load else ""),
        says=" ".join(_says(latency, known, mine)),
        traces=tuple(traces),
        layout=layout(
            f"{short}, s",
            "requests that are as fast or faster",
            xaxis=clear_axis(values),
            yaxis={"tickformat": ".0%", "range": [0, 1.02]},
            shapes=shapes,
            height=420,
        ),
        table=held,
    )


def _called(ran: Sequence[_Ran]) -> str:
    numbers = ", ".join(str(each.trial["number"]) for each in ran)
    trials = f"trial{'s' if len(ran) > 1 else ''} {numbers}"
    return f"{ran[0].who} again, {trials}" if ran[0].again else f"{ran[0].who}, {trials}"


def _curves(several: Sequence[Sequence[float]]) -> tuple[list[float | None], list[float | None]]:
    """Return lines of latency and share of requests, one after another, with a gap between them."""
    x: list[float | None] = []
    y: list[float | None] = []
    for values in several:
        both = [values[0], values[0]] if len(values) == 1 else list(values)
        x += [*both, None]
        y += [*(float(share) for share in np.linspace(0.0, 1.0, len(both))), None]
    return x[:-1], y[:-1]


def _share(statistic: str) -> float:
    return float(statistic.removeprefix("p")) / 100.0


def _says(latency: str, known: Sequence[_Ran], limits: Mapping[str, float]) -> Iterator[str]:
    short = serving_text.SHORT_LATENCIES[latency]
    for each in known:
        if each.again:
            continue
        half, most = (number(lookup(each.point, f"{latency}.{name}")) for name in ("p50", "p99"))
        yield (
            f"The {each.who}: half of the requests have a {short} of {shown(half)} s or less, 99 of 100 of at most "
            f"{shown(most)} s" + "".join(_within(each, limit) for limit in sorted(set(limits.values()))) + "."
        )


def _within(ran: _Ran, limit: float) -> str:
    shares = [_share_within(values, limit) for values in ran.values]
    return f"; {min(shares):.1%} are within {limit:g} s"


def _share_within(values: Sequence[float], limit: float) -> float:
    """Return the share of requests that take no longer than `limit`, between two quantiles in proportion."""
    if limit >= values[-1]:
        return 1.0
    if limit < values[0]:
        return 0.0
    return float(np.interp(limit, values, np.linspace(0.0, 1.0, len(values))))


def _statistics(run: RunData, latency: str) -> Table:
    """Return the statistics of every load point of the best, of the baseline and of their repeats."""
    rows = []
    for who, again, trial in _trials(run):
        for point in _points(trial):
            figures = [number(lookup(point, f"{latency}.{each}")) for each in STATISTICS]
            if figures[1] is not None:
                load = serving_text.load_text(point)
                name = f"{who} again" if again else who
                link = Cell(name_of(run, trial), float(trial["number"]), f"#trial-{trial['number']}")
                answered = number(point.get("answered"))
                rows.append(
                    [f"{name}, {load}" if load else name, link, cell(answered and int(answered)), *map(cell, figures)]
                )
    short = serving_text.SHORT_LATENCIES[latency]
    return table(
        f"{short} of requests, s; where a load ran several times, the median of each statistic",
        ["load point", "trial", "requests", *STATISTICS],
        rows,
    )


def _dots(latency: str, held: Table) -> Chart:
    """Return the statistics of each load point side by side."""
    short, first = serving_text.SHORT_LATENCIES[latency], 3
    names = [f"{row[0].text} (trial {row[1].text})" for row in held.rows]
    x: list[float | None] = []
    y: list[str | None] = []
    for row, name in zip(held.rows, names, strict=True):
        x += [row[first + 1].value, row[first + 3].value, None]
        y += [name, name, None]
    grey = {"color": "#888888", "width": 3}
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "line": grey, "x": x, "y": y, "showlegend": False, "hoverinfo": "skip"}
    ]
    for series, each in enumerate(STATISTICS):
        traces.append(points(each, series, [row[first + series].value for row in held.rows], names))
    told = held.rows[0]
    return Chart(
        title=f"{short} over the requests of a load point",
        says=f"{told[0].text}: half of the requests have a {short} of {told[first + 1].text} s or less, 99 of 100 of "
        f"at most {told[first + 3].text} s.",
        traces=tuple(traces),
        layout=rows_layout(f"{short}, s", len(held.rows), xaxis={"rangemode": "tozero"}),
        table=held,
    )
