"""Sections on serving: throughput against latency with the Pareto front, limits, and statistics of latencies."""

from collections.abc import Iterator, Sequence

from flagcore.domain.serving import PER_DEVICE, PER_USER, STATISTICS
from flagcore.domain.trial import Trial
from flagcore.i18n import _
from flagcore.report.formats import shown
from flagcore.report.page.blocks import Block, Chart, Plot, Section, Series, Table, Text, cell, linear, spread, table
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
    """Return the section on load points and latencies, or None for training."""
    if not run.serves or not any(_points(trial) for trial in run.trials):
        return None
    limits = limits_text(run.limits)
    blocks: list[Block] = [Text(_("Latency limits: {limits}.", limits=limits) if limits else _("No latency limits."))]
    unlimited_names = [f"{name}.p50" for name in LATENCIES if not any(each.startswith(name) for each in run.limits)]
    for latency in (*run.limits, *unlimited_names):
        blocks += _rates(run, latency, run.limits.get(latency))
    return Section("serving", _("Load"), [*blocks, *_statistics(run)])


def _points(trial: Trial) -> Sequence[Record]:
    return trial.measurement.points if trial.measurement else ()


def front_table(run: RunData) -> Table | None:
    """Return the table of the Pareto front of throughput and latency, or None if there is only one load point."""
    if not any(len(_points(trial)) > 1 for trial in run.trials):
        return None
    rows = [
        [str(point["trial"]), load_text(point), *(cell(point.get(key)) for key in FRONT.values())]
        for point in front(run)
    ]
    return table(_("Pareto front of throughput and latency"), [_("trial"), _("load"), *FRONT], rows)


def _rates(run: RunData, latency: str, limit: float | None) -> Iterator[Block]:
    """Yield a chart of output tokens per second and device against a latency. Each load point has a marker."""
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
    series = []
    if len(best_points) > 1:
        front_points = [(x, y, "") for x, y in best_points]
        series = [Series(name=_("Pareto front"), points=front_points, style=3, stepped=True)]
    for style, group in enumerate((_("others"), _("best"))):
        points = [
            (x, y, f"{_('trial')} {trial.number}: {load_text(point)}")
            for trial, point, x, y in measured
            if (run.best is not None and trial.number == run.best.number) == style
        ]
        if points:
            series.append(Series(name=group, points=points, style=style, large=bool(style)))
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
        drawing=Plot(
            x=spread(f"{name}, s", [*(x for *_, x, _y in measured), *limits]),
            y=linear(short, [y for *_, y in measured]),
            series=series,
            limits=[(_("limit {seconds:g} s", seconds=each), each) for each in limits],
        ),
        table=table(_("Load points by {rate} and {latency}", rate=short, latency=name), headings, rows, sortable=True),
    )


def _statistics(run: RunData) -> Iterator[Table]:
    """Yield tables with the statistics of each latency, for the best and the baseline, each followed by its repeats.

    If there is no best, the trial nearest to the limits replaces it.
    """
    first, baseline = run.best or run.nearest, run.baseline
    if first and baseline and baseline.candidate == first.candidate:
        baseline = None
    runs = [
        (who if each is trial else f"{who}, {_('repeat')}", each)
        for who, trial in ((_("best") if run.best else _("nearest"), first), (_("baseline"), baseline))
        if trial and trial.measurement
        for each in run.runs(trial)
    ]
    for latency in LATENCIES:
        rows = []
        for who, trial in runs:
            for point in _points(trial):
                figures, answered = [point.get(f"{latency}.{each}") for each in STATISTICS], point.get("answered")
                if figures[1] is not None:
                    name = ", ".join(filter(None, [who, load_text(point)]))
                    rows.append([name, run.cell(trial), answered and int(answered), *figures])
        headings = [_("load point"), _("trial"), _("requests"), *STATISTICS]
        caption = _("{latency} of requests, s; median over repeats of a load point", latency=SHORT_LATENCIES[latency])
        if rows:
            yield table(caption, headings, rows)
