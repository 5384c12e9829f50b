"""Sections on the bottleneck of the best, the influence of each knob, the step time, the memory and the pipeline.

Sections on serving: throughput against latency with the Pareto front, limits, and statistics of latencies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flagcore.domain.metrics import PER_DEVICE, STATISTICS, load_text
from flagcore.domain.prediction import Passes, Prediction
from flagcore.domain.records import read_prediction
from flagcore.domain.trial import Trial
from flagcore.i18n import N_, _
from flagcore.report import text as texts
from flagcore.report.blocks import Table, Text, cell, percent, table
from flagcore.report.explanation import by_component, memory_parts
from flagcore.report.formats import NAMES, shown, size_text
from flagcore.report.result import number
from flagcore.report.run import Record, RunData, measured_s
from flagcore.spec.plain_data import lookup
from flagcore_page.blocks import (
    OTHER,
    Bar,
    Bars,
    Block,
    Chart,
    Collapsed,
    Plot,
    Section,
    Series,
    Stack,
    Stacks,
    linear,
    size,
    spread,
)

MAX_KNOBS = 10
"""The maximum number of knobs in a chart, those with the largest influence."""


def improvements(run: RunData) -> Section | None:
    """Return the section on the bottleneck of the best and the influence of each knob.

    Returns None if there is no best, or if it has no predicted time.
    """
    if run.best is None or run.best.predicted is None or run.best.predicted_step_s is None:
        return None
    value, *_bounds = run.predicted(run.best) or (None,)
    predicted = _("Predicted: {value} {unit}.", value=shown(value), unit=run.unit)
    knobs, text = run.insight.get("knobs"), Text(texts.bottleneck_text(run.best.predicted) or predicted)
    return Section("improvements", _("Bottleneck"), [text, *([_sensitivity(run, knobs)] if knobs else [])], half=True)


def _sensitivity(run: RunData, knobs: Sequence[Record]) -> Chart:
    """Return a chart of the slowdown by the worst value of each knob, with a table of all values."""
    fastest_s = min(_seconds(value) for knob in knobs for value in knob["values"])
    rows, bars = list[list[Any]](), list[Bar]()
    for knob in sorted(knobs, key=lambda knob: -max(map(_seconds, knob["values"]))):
        own = texts.knob_of(str(knob["knob"]), run.knobs)
        name = own.title
        for value in knob["values"]:
            figure = lookup(value, "fastest.predicted.objective.value") if run.serves else _seconds(value)
            row: list[Any] = [
                name,
                texts.value_text(texts.word_of(own, value["value"])),
                _("yes") if value["value"] == knob["best"] else "",
            ]
            row += [percent(_seconds(value) / fastest_s - 1.0, signed=True), figure, value["candidates"]]
            rows.append([*row, texts.values_text(value["fastest"]["candidate"], run.knobs)])
        best, worst = (pick(knob["values"], key=_seconds) for pick in (min, max))
        names = {
            key: texts.value_text(texts.word_of(own, each["value"])) for key, each in (("worst", worst), ("best", best))
        }
        slower = _seconds(worst) / fastest_s - 1.0
        text = _("{knob}: {worst} instead of {best}", knob=name, **names)
        bars.append(Bar(text, OTHER, slower, slower, slower, f"+{slower:.1%}"))
    figure_heading = f"~{run.unit}" if run.serves else _("~step s")
    headings = [_("knob"), _("value"), _(NAMES["best_row"][run.fidelity]), _("~slower by"), figure_heading]
    headings.append(_("candidates that fit in memory"))
    caption = _("The fastest predicted candidate with each value, compared to the fastest of all")
    text = N_(
        "{knob} has the largest influence: its worst value makes the fastest candidate {share:.1%} slower. Other "
        "knobs are re-optimized for each value."
    )
    return Chart(
        title=_("Influence of each knob (predicted)"),
        summary=_(text, knob=rows[0][0], share=bars[0].value),
        drawing=Bars(_("slower by"), bars[:MAX_KNOBS]),
        tables=[table(caption, [*headings, _("fastest")], rows, sortable=True)],
    )


def _seconds(value: Record) -> float:
    return float(lookup(value, "fastest.predicted.step_time_s.value"))


LEVELS = NAMES["memory_levels"]
MEASURED = {name: name for name in LEVELS} | {"reserved_bytes": "peak_reserved_bytes"}
"""The names of the memory levels in a measurement."""
STEP_TEXTS = (
    N_("Step time"),
    N_("Parts of the step time (predicted)"),
    N_("{name}: {part} takes {share:.1%} of a step of ~{seconds} s."),
)
REQUEST_TEXTS = (
    N_("Time of a request"),
    N_("Parts of the mean time of a request (predicted)"),
    N_("{name}: {part} takes {share:.1%} of a request of ~{seconds} s."),
)
"""Title, caption and summary of the parts of the time, for training and for servers."""


def memory(run: RunData) -> Section | None:
    """Return the section on the memory of one device per stage of the best, or None if there is no best."""
    if run.best is None:
        return None
    prediction, measured = run.best.predicted, run.measured(run.best)
    if prediction is None:
        return Section("memory", _("Memory"), [Text(_("The memory was not predicted."))])
    stages = [stage for stage in run.insight.get("stages") or [] if stage["components"]]
    peaks = [
        {**each, "activation_gib": each["peak_allocated_gib"] - each["static_gib"], "worst_stage": each["stage"]}
        for each in stages
    ]
    found = [read_prediction({"memory": each}) for each in peaks] or [prediction]
    levels = _measured_by_stage(run, len(found))
    if not any(levels) and measured and len(found) == 1:
        own = {level: getattr(measured, key) for level, key in MEASURED.items()}
        levels = [{level: float(figure) for level, figure in own.items() if figure is not None}]
    tables = [_by_stage(found, levels, prediction), *([_components(run, found)] if stages else [])]
    worst, capacity = max(found, key=lambda each: each.device_used_bytes), prediction.capacity_bytes
    used = f"~{size_text(worst.device_used_bytes)}" + ("" if capacity is None else f" / {size_text(capacity)}")
    summary = _("A device needs {used} (predicted).", used=used)
    if len(found) > 1:
        summary = _("Stage {number} needs the most memory: {used} (predicted).", number=worst.worst_stage, used=used)
    stacks = [
        Stack(
            _("stage {number}", number=each.worst_stage) if len(found) > 1 else _("device"),
            {_(name): max(part, 0.0) for name, part in memory_parts(each).items()},
            _predicted_and_measured(size_text(each.device_used_bytes), level.get("device_used_bytes"), size_text),
            level.get("device_used_bytes"),
        )
        for each, level in zip(found, levels, strict=True)
    ]
    limit = None if capacity is None else (_("limit {size}", size=size_text(capacity)), capacity)
    drawing = Stacks(stacks=stacks, mark=_("measured"), limit=limit)
    chart = Chart(title=_("Memory of a device"), summary=summary, drawing=drawing, tables=tables)
    return Section("memory", _("Memory"), [chart], half=True)


def _predicted_and_measured(predicted: str, measured: float | None, text_of: Callable[[float], str]) -> str:
    if measured is None:
        return f"~{predicted}"
    return _("~{predicted}, measured {measured}", predicted=predicted, measured=text_of(measured))


def _by_stage(found: Sequence[Prediction], measured: Sequence[Mapping[str, float]], whole: Prediction) -> Table:
    """Return a table with the parts and levels of each stage."""
    parts = [memory_parts(each) for each in found]
    names = dict.fromkeys(name for each in parts for name in each)
    columns = {_("stage"): [cell(each.worst_stage) for each in found]}
    columns |= {f"~{_(name)}": [size(each.get(name)) for each in parts] for name in names}
    columns |= {f"~{_(text)}": [size(getattr(each, name)) for each in found] for name, text in LEVELS.items()}
    for name, text in LEVELS.items():
        if any(name in each for each in measured):
            columns[_("{level}, measured", level=_(text))] = [size(each.get(name)) for each in measured]
    columns[_("capacity")] = [size(whole.capacity_bytes)] * len(found)
    if (tokens := whole.figures.get("kv_cache_tokens")) is not None:
        columns[_("~capacity of the KV cache, tokens")] = [cell(tokens)] * len(found)
    caption = _("Memory per device, by pipeline stage") if len(found) > 1 else _("Memory of a device")
    return table(caption, list(columns), list(zip(*columns.values(), strict=True)))


def _components(run: RunData, stages: Sequence[Prediction]) -> Table:
    labels = run.labels
    names = {**NAMES["component_states"], "activation_bytes": N_("activations")}
    keys = [key for key in names if any(key in part for stage in stages for part in stage.components.values())]
    rows = [
        [cell(stage.worst_stage), labels.components.get(name, name)]
        + [size(stage.components[name].get(key)) for key in keys]
        for stage in stages
        for name in by_component(stage.components, labels)
    ]
    headings = [_("stage"), _("component"), *(_(names[key]) for key in keys)]
    return table(_("By component and kind (predicted)"), headings, rows, sortable=True)


def _measured_by_stage(run: RunData, count: int) -> list[dict[str, float]]:
    """Return the maximum of the figures over the ranks of each stage and the runs that count. Ranks are ordered by
    stage."""
    figures_by_stage: list[dict[str, float]] = [{} for _ in range(count)]
    for trial in run.counted(run.best) if run.best else ():
        ranks = run.metrics(trial).get("ranks") if trial.measurement else None
        if not isinstance(ranks, list) or len(ranks) % count:
            continue
        for place, rank in enumerate(ranks):
            largest = figures_by_stage[place // (len(ranks) // count)]
            for level, key in MEASURED.items():
                if (figure := number(lookup(rank, key))) is not None:
                    largest[level] = max(largest.get(level, 0.0), figure)
    return figures_by_stage


def step_time(run: RunData) -> Section | None:
    """Return the section on the parts of the time of the best and the baseline, or None without a prediction.

    A chart has the parts of the predicted time of each trial, with the measured time: for a server, the mean time of a
    request.
    """
    named = ((NAMES["best_row"][run.fidelity], run.best), ("baseline", run.baseline))
    trials = {_(name): trial for name, trial in named if trial}
    if run.best and run.baseline and run.best.candidate == run.baseline.candidate:
        del trials[_("baseline")]
    times = {name: each.predicted.parts_s for name, each in trials.items() if each.predicted and each.predicted.parts_s}
    if not times:
        return None
    heading, title, summary = REQUEST_TEXTS if run.serves else STEP_TEXTS
    totals = {name: sum(time.values()) or 1.0 for name, time in times.items()}
    runs = {name: run.runs_of(trials[name].candidate) for name in times}
    measured = {name: each.figures.get("e2e_s.mean") if run.serves else each.median_s for name, each in runs.items()}
    first, time = next(iter(times.items()))
    largest = max(time, key=lambda part: time[part])
    names = {"name": first.capitalize(), "part": _(texts.part_name(largest)), "seconds": shown(totals[first])}
    rows, listed = list[list[Any]](), dict.fromkeys(part for time in times.values() for part in time)
    for part in listed:
        shares = ((time.get(part, 0.0), time.get(part, 0.0) / totals[name]) for name, time in times.items())
        rows.append([_(texts.part_name(part)), *(each for spent, share in shares for each in (spent, percent(share)))])
    for text, figures in ((_("predicted"), totals), (_("measured"), measured)):
        rows.append([text, *(each for figure in figures.values() for each in (figure, None))])
    tables = [table(_(title), [_("part"), *(each for name in times for each in (f"~{name}, s", "~%"))], rows)]
    if parts := {name: figures for name, trial in trials.items() if (figures := run.step_parts(trial))}:
        headings = [_("trial"), *(_(text) for text in run.labels.measured_parts.values()), _("step s")]
        rows = [[name, *figures.values(), measured_s(trials[name])] for name, figures in parts.items()]
        tables.append(table(_("Seconds that the trial program measured, median over steps"), headings, rows))
    stacks = [
        Stack(
            f"{name}: {run.configuration(trials[name])}",
            {_(texts.part_name(part)): spent_s for part in listed if (spent_s := time.get(part))},
            _predicted_and_measured(f"{shown(totals[name])} s", measured[name], lambda seconds: f"{shown(seconds)} s"),
            measured[name],
        )
        for name, time in times.items()
    ]
    summary = _(summary, **names, share=time[largest] / totals[first])
    chart = Chart(title=_(title), summary=summary, drawing=Stacks(stacks=stacks, mark=_("measured")), tables=tables)
    return Section("step", _(heading), [chart], half=True)


def pipeline(run: RunData) -> Section | None:
    """Return the section with the stages of each different pipeline of the best, or None if it has no pipeline.

    With several kinds of chips, replicas without a pipeline are included.
    """
    chips = [str(chip.get("title") or chip["name"]) for chip in run.insight.get("chips") or ()]
    chips = chips if len(chips) > 1 else []
    tables = []
    for data in run.insight.get("pipelines") or ():
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        passes = Passes(**fields)
        if len(passes.forward_s) > 1 or (chips and passes.groups):
            tables.append(_stages(passes, chips))
    return Section("pipeline", _("Pipeline"), tables) if tables else None


def _stages(passes: Passes, chips: Sequence[str]) -> Table:
    """Return a table with the chip, the seconds per micro-batch, the busy time and the idle share of each stage."""
    columns: dict[str, Sequence[Any]] = {_("stage"): range(len(passes.forward_s))}
    if chips:
        columns[_("chip")] = [chips[group] for group in passes.groups]
        columns[_("layers")] = passes.layers
    columns |= {_("~forward, s"): passes.forward_s, _("~backward, s"): passes.backward_s}
    if any(passes.weight_s):
        columns[_("~weight gradients, s")] = passes.weight_s
    columns[_("~concurrent, s")] = passes.paired_s
    busy_s = [passes.microbatches * sum(times) for times in zip(passes.forward_s, passes.backward_s, strict=True)]
    columns[_("~busy, s")] = busy_s
    if passes.predicted_s:
        columns[_("~idle, %")] = [percent(share) for share in passes.idle(passes.predicted_s)]
    known_columns = {heading: values for heading, values in columns.items() if values}
    caption = _(
        "Seconds per micro-batch, and busy over {count} micro-batches, schedule {name}; a message takes {seconds} s",
        count=passes.microbatches,
        name="1f1b" if passes.schedule == "interleaved" and passes.virtual < 2 else passes.schedule,
        seconds=shown(passes.send_s),
    )
    return table(caption, list(known_columns), list(zip(*known_columns.values(), strict=True)))


LATENCIES = ("ttft_s", "tpot_s")


def serving(run: RunData) -> Section | None:
    """Return the section on load points and latencies, or None for training."""
    if not run.serves or not any(measured_points(trial) for trial in run.trials):
        return None
    limits = texts.limits_text(run.limits)
    blocks: list[Block] = [Text(_("Latency limits: {limits}.", limits=limits) if limits else _("No latency limits."))]
    unlimited_names = [f"{name}.p50" for name in LATENCIES if not any(each.startswith(name) for each in run.limits)]
    for latency in (*run.limits, *unlimited_names):
        blocks += _rates(run, latency, run.limits.get(latency))
    if statistics := [*_statistics(run)]:
        blocks.append(Collapsed("latencies", _("Latencies of the best and the baseline"), statistics))
    return Section("serving", _("Load"), blocks)


def measured_points(trial: Trial) -> Sequence[Record]:
    """Return the measured load points of a trial of a server."""
    return trial.measurement.points if trial.measurement else ()


def _rates(run: RunData, latency: str, limit: float | None) -> Iterator[Block]:
    """Yield a chart of output tokens per second and device against a latency. Each load point has a marker."""
    measured = [
        (trial, point, x, y)
        for trial in run.trials
        for point in measured_points(trial)
        if (x := number(point.get(latency))) is not None and (y := number(point.get(PER_DEVICE))) is not None
    ]
    if not measured:
        return
    name, short = texts.latency_name(latency), texts.SHORT_RATES[PER_DEVICE]
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
    front = Series(name=_("Pareto front"), points=[(x, y, "") for x, y in best_points], style=3, stepped=True)
    series = [front] if len(best_points) > 1 else []
    for style, group in enumerate((_("others"), _("best"))):
        points = [
            (x, y, f"{_('trial')} {trial.number}: {load_text(point)}" if trial.number in listed else "")
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
        tables=[
            table(_("Load points by {rate} and {latency}", rate=short, latency=name), headings, rows, sortable=True)
        ],
    )


def _statistics(run: RunData) -> Iterator[Table]:
    """Yield tables with the statistics of each latency, for the best and the baseline, each followed by its repeats.

    If there is no best, the trial nearest to the limits replaces it.
    """
    first, baseline = run.best or run.nearest, run.baseline
    if first and baseline and baseline.candidate == first.candidate:
        baseline = None
    runs = [
        (who if each.number == trial.number else f"{who}, {_('repeat')}", each)
        for who, trial in ((_("best") if run.best else _("nearest"), first), (_("baseline"), baseline))
        if trial and trial.measurement
        for each in run.counted(trial)
    ]
    for latency in LATENCIES:
        rows = []
        for who, trial in runs:
            for point in measured_points(trial):
                figures, answered = [point.get(f"{latency}.{each}") for each in STATISTICS], point.get("answered")
                if figures[1] is not None:
                    name = ", ".join(filter(None, [who, load_text(point)]))
                    rows.append([name, run.cell(trial), answered and int(answered), *figures])
        headings = [_("load point"), _("trial"), _("requests"), *STATISTICS]
        caption = _(
            "{latency} of requests, s; median over repeats of a load point", latency=texts.SHORT_LATENCIES[latency]
        )
        if rows:
            yield table(caption, headings, rows)
