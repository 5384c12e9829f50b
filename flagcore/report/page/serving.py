"""Serving: throughput against latency with its Pareto front, limits, and distributions of latencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from flagcore.domain.serving import PER_DEVICE, PER_USER, STATISTICS
from flagcore.domain.trial import Trial
from flagcore.i18n import _
from flagcore.report.formats import shown
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
from flagcore.report.page.run import Record, RunData
from flagcore.report.result import front, number
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
    if not run.serves or not any(_points(trial) for trial in run.trials):
        return None
    limits = limits_text(run.limits)
    blocks: list[Block] = [Text(_("Latency limits: {limits}.", limits=limits) if limits else _("No latency limits."))]
    unlimited_names = [f"{name}.p50" for name in LATENCIES if not any(each.startswith(name) for each in run.limits)]
    for latency in (*run.limits, *unlimited_names):
        blocks += _rates(run, latency, run.limits.get(latency))
    return Section("serving", _("Load"), [*blocks, *_distributions(run)])


def _points(trial: Trial) -> Sequence[Record]:
    return trial.measurement.points if trial.measurement else ()


def front_table(run: RunData) -> Table | None:
    """Return the Pareto front of throughput and latency; None for one load point."""
    if not any(len(_points(trial)) > 1 for trial in run.trials):
        return None
    rows = [
        [str(point["trial"]), load_text(point), *(cell(point.get(key)) for key in FRONT.values())]
        for point in front(run)
    ]
    return table(_("Pareto front of throughput and latency"), [_("trial"), _("load"), *FRONT], rows)


def _rates(run: RunData, latency: str, limit: float | None) -> Iterator[Block]:
    """Yield a chart of output tokens per second and device against a latency, with one marker per load point."""
    measured = [
        (trial, point, x, y)
        for trial in run.trials
        for point in _points(trial)
        if (x := number(point.get(latency))) is not None and (y := number(point.get(RATE))) is not None
    ]
    if not measured:
        return
    name, short = latency_name(latency), SHORT_RATES[RATE]
    best_points = list[tuple[float, float]]()
    for x, y in sorted({(x, y) for *_trial, x, y in measured}, key=lambda point: (point[0], -point[1])):
        if not best_points or y > best_points[-1][1]:
            best_points.append((x, y))
    rows, listed, limits = [], run.listed, [] if limit is None else [limit]
    for trial, point, x, y in (each for each in measured if each[0].number in listed):
        first = [run.cell(trial), run.configuration(trial), load_text(point)]
        rows.append([*first, y, x, (x, y) in best_points, *(x <= each for each in limits)])
    headings = [_("trial"), _("configuration"), _("load"), short, f"{name}, s", _("Pareto-optimal")]
    headings += [_("within {limit:g} s", limit=each) for each in limits]
    traces = []
    if len(best_points) > 1:
        traces = [line(_("Pareto front"), 3, *zip(*best_points, strict=True))]
        traces[0]["line"] |= {"shape": "hv"}
    for series, group, size in ((0, _("others"), 9), (1, _("best"), 14)):
        members = [each for each in measured if (run.best is not None and each[0].number == run.best.number) == series]
        if members:
            text = [f"{_('trial')} {trial.number}: {load_text(point)}" for trial, point, _x, _y in members]
            trace = points(group, series, [x for *_, x, _y in members], [y for *_, y in members], text=text)
            traces.append(trace | {"marker": {**trace["marker"], "size": size}})
    top = max(measured, key=lambda each: each[3])
    yield Chart(
        title=_("{rate} against {latency}", rate=short, latency=name),
        summary=_(
            "{count} of {total} load points are Pareto-optimal; the maximum is {rate} {unit} at {seconds} s {latency}.",
            count=len(best_points),
            total=len(measured),
            rate=shown(top[3]),
            unit=short,
            seconds=shown(top[2]),
            latency=name,
        ),
        traces=traces,
        layout=layout(
            f"{name}, s",
            short,
            shapes=[limit_line(_("limit {seconds:g} s", seconds=each), each) for each in limits],
            xaxis=clear_axis([*(x for *_, x, _y in measured), *limits]),
        ),
        table=table(_("Load points by {rate} and {latency}", rate=short, latency=name), headings, rows, sortable=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A trial of the best or the baseline, or a repeat (`again`).

    `values` are ascending quantiles of a latency in seconds, one list per repetition of the load.
    """

    who: str
    again: bool
    trial: Trial
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


def _trials(run: RunData) -> Iterator[tuple[str, bool, Trial]]:
    """Yield the best (or else the trial nearest to the limits) and the baseline, each followed by its repeats."""
    first, baseline = run.best or run.nearest, run.baseline
    if first and baseline and baseline.candidate == first.candidate:
        baseline = None
    for who, trial in ((_("best") if run.best else _("nearest"), first), (_("baseline"), baseline)):
        if trial and trial.measurement:
            yield from ((who, each is not trial, each) for each in run.runs(trial) if each.measurement)


def _runs(run: RunData, latency: str) -> Iterator[_Run]:
    """Yield the saved quantiles of the load point by which the best was rated."""
    best = run.best or run.nearest
    figures = best.measurement.figures if best and best.measurement else {}
    names = [name for name in figures if name.partition(".")[0] in ("output_tokens_per_s", "e2e_s", "ttft_s")]
    matches = (all(point.get(name) == figures[name] for name in names) for point in (_points(best) if best else ()))
    place = next((place for place, is_same in enumerate(matches) if is_same), 0)
    for who, again, trial in _trials(run):
        if place < len(_points(trial)):
            values = tuple(_quantiles(run, trial, place, latency))
            yield _Run(who=who, again=again, trial=trial, point=_points(trial)[place], values=values)


def _quantiles(run: RunData, trial: Trial, place: int, latency: str) -> Iterator[tuple[float, ...]]:
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
            curve = _curve([values for each in same_group for values in each.values])
            trace = line(_legend(same_group), series, *zip(*curve, strict=True))
            trace["line"] |= {"width": 1.5 if again else 3}
            traces.append(trace)
    for series, each in enumerate(one for one in runs if not one.again):
        marks = [(number(each.point.get(f"{latency}.{name}")), float(name[1:]) / 100.0) for name in STATISTICS[1:]]
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
        traces=traces,
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


def _curve(several: Sequence[Sequence[float]]) -> list[tuple[float | None, float | None]]:
    """Return the points of lines of latency and share of requests, with a gap between two lines."""
    curve: list[tuple[float | None, float | None]] = []
    for values in several:
        quantiles = [*values, *values] if len(values) == 1 else values
        shares = map(float, np.linspace(0.0, 1.0, len(quantiles)))
        curve += [*zip(quantiles, shares, strict=True), (None, None)]
    return curve[:-1]


def _summary(latency: str, ran: _Run, limits: Mapping[str, float]) -> str:
    median, p99 = (number(ran.point.get(f"{latency}.{name}")) for name in ("p50", "p99"))
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
        for point in _points(trial):
            figures = [number(point.get(f"{latency}.{each}")) for each in STATISTICS]
            if figures[1] is not None:
                name = ", ".join(filter(None, [who, _("repeat") if again else "", load_text(point)]))
                answered = number(point.get("answered"))
                rows.append([name, run.cell(trial), answered and int(answered), *figures])
    return table(
        _("{latency} of requests, s; median over repeats of a load point", latency=SHORT_LATENCIES[latency]),
        [_("load point"), _("trial"), _("requests"), *STATISTICS],
        rows,
    )
