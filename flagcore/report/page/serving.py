"""Serving: throughput against latency with its Pareto front, limits, and distributions of latencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flagcore.domain.serving import PER_DEVICE, PER_USER, STATISTICS
from flagcore.i18n import _
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import (
    Block,
    Chart,
    Section,
    Table,
    Text,
    cell,
    clear_axis,
    layout,
    limit_line,
    line,
    points,
    table,
)
from flagcore.report.page.run import Record, RunData, configuration, listed, trial_cell
from flagcore.report.result import TrialResult, number
from flagcore.report.text import SHORT_LATENCIES, SHORT_RATES, latency_name, limits_text, load_text

LATENCIES = ("ttft_s", "tpot_s")
RATE = PER_DEVICE
FRONT = {
    "output tok/s/dev": RATE,
    "output tok/s/user": PER_USER,
    "TTFT p50 s": "ttft_s.p50",
    "TTFT p99 s": "ttft_s.p99",
}


def serving(run: RunData) -> Section | None:
    """Return load points and latencies; None for training."""
    if not run.serves or not any(trial.points for trial in run.trials):
        return None
    limits = limits_text(run.limits)
    blocks: list[Block] = [Text(_("Latency limits: {limits}.", limits=limits) if limits else _("No latency limits."))]
    unlimited_names = [f"{name}.p50" for name in LATENCIES if not any(each.startswith(name) for each in run.limits)]
    for latency in (*run.limits, *unlimited_names):
        blocks += _latency_traces(run, latency, run.limits.get(latency))
    return Section(anchor="serving", title=_("Load"), blocks=(*blocks, *_distributions(run)))


def front_table(run: RunData) -> Table | None:
    """Return the Pareto front of throughput and latency; None for one load point."""
    if not any(len(trial.points) > 1 for trial in run.trials):
        return None
    rows = [
        [str(point["trial"]), load_text(point), *(cell(lookup(point, key)) for key in FRONT.values())]
        for point in run.result.front or ()
    ]
    return table(_("Pareto front of throughput and latency"), [_("trial"), _("load"), *FRONT], rows)


_Point = tuple[TrialResult, Record, float, float]
"""A trial, one of its load points, the latency and the rate."""


def _latency_traces(run: RunData, latency: str, limit: float | None) -> Iterator[Block]:
    """Yield traces of output tokens per second and device against a latency, with one marker per load point."""
    measured: list[_Point] = [
        (trial, point, x, y)
        for trial in run.trials
        for point in trial.points
        if (x := number(lookup(point, latency))) is not None and (y := number(point.get(RATE))) is not None
    ]
    if not measured:
        return
    name, short = latency_name(latency), SHORT_RATES[RATE]
    front = _front([(x, y) for _, _, x, y in measured])
    rows, shown_numbers = [], listed(run)
    for trial, point, x, y in (each for each in measured if each[0].number in shown_numbers):
        points = [] if limit is None else [cell(x <= limit)]
        first = [trial_cell(run, trial), configuration(run, trial), load_text(point)]
        rows.append([*first, cell(y), cell(x), cell((x, y) in front), *points])
    headings = [_("trial"), _("configuration"), _("load"), short, f"{name}, s", _("Pareto-optimal")]
    data = table(
        _("Load points by {rate} and {latency}", rate=short, latency=name),
        [*headings, *([_("within {limit:g} s", limit=limit)] if limit is not None else [])],
        rows,
        sortable=True,
    )
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
        traces=tuple(_load_point_traces(run, measured, front)),
        layout=layout(
            f"{name}, s",
            short,
            shapes=[limit_line(_("limit {seconds:g} s", seconds=each), each) for each in limits],
            xaxis=clear_axis([*(x for *_, x, _ in measured), *limits]),
        ),
        table=data,
    )


def _load_point_traces(
    run: RunData, measured: Sequence[_Point], front: Sequence[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    if len(front) > 1:
        trace = line(_("Pareto front"), 3, [x for x, _ in front], [y for _, y in front])
        trace["line"] |= {"shape": "hv"}
        yield trace
    best = run.best.number if run.best else None
    for series, group, size in ((0, _("others"), 9), (1, _("best"), 14)):
        members = [each for each in measured if (each[0].number == best) == (series == 1)]
        if members:
            text = [f"{_('trial')} {trial.number}: {load_text(point)}" for trial, point, _x, _y in members]
            trace = points(group, series, [x for *_, x, _ in members], [y for *_, y in members], text=text)
            yield trace | {"marker": {**trace["marker"], "size": size}}


def _front(all_points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    front: list[tuple[float, float]] = []
    for x, y in sorted(all_points, key=lambda point: (point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A trial of the best or the baseline, or a repeat (`again`).

    `values` are ascending quantiles of a latency in seconds, one list per repetition of the load.
    """

    who: str
    again: bool
    trial: TrialResult
    point: Record
    values: tuple[tuple[float, ...], ...]


def _distributions(run: RunData) -> Iterator[Block]:
    """Yield the distribution of each latency, or its statistics if quantiles are missing."""
    has_legend = False
    for latency in LATENCIES:
        statistics = _statistics(run, latency)
        if not statistics.rows:
            continue
        runs = [each for each in _runs(run, latency) if each.values]
        if runs:
            yield _distribution(latency, runs, run.limits, statistics)
            continue
        if not has_legend:
            yield Text(_("No distributions: the latencies of single requests of this run are not saved."))
        has_legend = True
        yield statistics


def _trials(run: RunData) -> Iterator[tuple[str, bool, TrialResult]]:
    """Yield the best (or else the trial nearest to the limits) and the baseline, each followed by its repeats."""
    first = (_("best"), run.best) if run.best else (_("nearest"), run.nearest)
    for who, trial in (first, (_("baseline"), run.baseline)):
        is_other_trial = (
            trial is not first[1] and first[1] is not None and trial and trial.candidate == first[1].candidate
        )
        if trial and trial.measured and not is_other_trial:
            yield from ((who, each is not trial, each) for each in run.runs(trial) if each.measured)


def _runs(run: RunData, latency: str) -> Iterator[_Run]:
    """Yield the saved quantiles of the load point by which the best was rated."""
    place = _deciding_point(run.best or run.nearest)
    for who, again, trial in _trials(run):
        if place < len(trial.points):
            values = tuple(_quantiles(run, trial, place, latency))
            yield _Run(who=who, again=again, trial=trial, point=trial.points[place], values=values)


def _deciding_point(best: TrialResult | None) -> int:
    """Return the index of the load point with the figures of the measurement."""
    figures = (best and best.measured and best.measured.figures) or {}
    keys = ("output_tokens_per_s", "e2e_s", "ttft_s")
    matches = (all(point.get(key) == figures.get(key) for key in keys) for point in (best.points if best else ()))
    return next((place for place, is_same in enumerate(matches) if is_same), 0)


def _quantiles(run: RunData, trial: TrialResult, place: int, latency: str) -> Iterator[tuple[float, ...]]:
    """Yield the valid quantiles in the metrics.json of a trial."""
    try:
        repeats = run.metrics(trial)["points"][place]["repeats"]
        quantiles = [repeat["quantiles"][latency] for repeat in repeats]
    except (LookupError, TypeError):
        return
    for values in quantiles:
        if not isinstance(values, list) or not values or not all(isinstance(each, (int, float)) for each in values):
            continue
        if all(math.isfinite(each) and each >= 0 for each in values) and all(a <= b for a, b in pairwise(values)):
            yield tuple(float(each) for each in values)


def _distribution(latency: str, runs: Sequence[_Run], limits: Mapping[str, float], statistics: Table) -> Chart:
    short_name = SHORT_LATENCIES[latency]
    own_limits = {name: limit for name, limit in limits.items() if name.partition(".")[0] == latency}
    traces: list[dict[str, Any]] = []
    for series, again in ((0, False), (2, True), (1, False), (3, True)):
        same_group = [each for each in runs if (each.who == _("baseline"), each.again) == (series % 2 == 1, again)]
        if same_group:
            trace = line(
                _legend(same_group), series, *_curve_points([values for each in same_group for values in each.values])
            )
            trace["line"] |= {"width": 1.5 if again else 3}
            traces.append(trace)
    for series, each in enumerate(one for one in runs if not one.again):
        marks = [(number(lookup(each.point, f"{latency}.{name}")), float(name[1:]) / 100.0) for name in STATISTICS[1:]]
        present = [(x, y) for x, y in marks if x is not None]
        traces.append(points(f"p50, p90, p99 ({each.who})", series, [x for x, _ in present], [y for _, y in present]))
    shapes = [
        limit_line(_("limit {seconds:g} s", seconds=limit) + f" ({latency_name(name)})", limit)
        for name, limit in own_limits.items()
    ]
    values = [float(x) for trace in traces for x in trace["x"] if x is not None]
    load = load_text(runs[0].point)
    return Chart(
        title=_("Distribution of {latency} over requests", latency=short_name) + (f", {load}" if load else ""),
        summary=" ".join(_summary(latency, each, own_limits) for each in runs if not each.again),
        traces=tuple(traces),
        layout=layout(
            f"{short_name}, s",
            _("share of requests"),
            xaxis=clear_axis([*values, *own_limits.values()]),
            yaxis={"tickformat": ".0%", "range": [0, 1.02]},
            shapes=shapes,
            height=420,
        ),
        table=statistics,
    )


def _legend(runs: Sequence[_Run]) -> str:
    numbers = ", ".join(str(each.trial.number) for each in runs)
    return ", ".join([runs[0].who, *([_("repeat")] if runs[0].again else []), f"{_('trial')} {numbers}"])


def _curve_points(several: Sequence[Sequence[float]]) -> tuple[list[float | None], list[float | None]]:
    """Return lines of latency and share of requests, with a gap between two lines."""
    x: list[float | None] = []
    y: list[float | None] = []
    for values in several:
        quantile_values = [values[0], values[0]] if len(values) == 1 else list(values)
        x += [*quantile_values, None]
        y += [*(float(share) for share in np.linspace(0.0, 1.0, len(quantile_values))), None]
    return x[:-1], y[:-1]


def _summary(latency: str, ran: _Run, limits: Mapping[str, float]) -> str:
    median, p99 = (number(lookup(ran.point, f"{latency}.{name}")) for name in ("p50", "p99"))
    text = f"{ran.who.capitalize()}: {SHORT_LATENCIES[latency]} p50 {shown(median)} s, p99 {shown(p99)} s"
    for limit in sorted(set(limits.values())):
        share = min(_share_within(values, limit) for values in ran.values)
        text += "; " + _("{share:.1%} of requests within {limit:g} s", share=share, limit=limit)
    return f"{text}."


def _share_within(values: Sequence[float], limit: float) -> float:
    """Return the share of requests within `limit`, interpolated between quantiles."""
    if limit >= values[-1]:
        return 1.0
    return float(np.interp(limit, values, np.linspace(0.0, 1.0, len(values)), left=0.0))


def _statistics(run: RunData, latency: str) -> Table:
    rows = []
    for who, again, trial in _trials(run):
        for point in trial.points:
            figures = [number(lookup(point, f"{latency}.{each}")) for each in STATISTICS]
            if figures[1] is not None:
                parts = [who, _("repeat") if again else "", load_text(point)]
                answered_count = number(point.get("answered"))
                name = ", ".join(filter(None, parts))
                rows.append(
                    [name, trial_cell(run, trial), cell(answered_count and int(answered_count)), *map(cell, figures)]
                )
    return table(
        _("{latency} of requests, s; median over repeats of a load point", latency=SHORT_LATENCIES[latency]),
        [_("load point"), _("trial"), _("requests"), *STATISTICS],
        rows,
    )
