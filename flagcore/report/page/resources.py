"""Memory of the best configuration by component and pipeline stage, and the parts of its step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flagcore.domain.trial import RUN, Trial
from flagcore.i18n import N_, _
from flagcore.report.explanation import by_component, memory_parts, part_name
from flagcore.report.formats import NAMES, lookup, shown, size_text
from flagcore.report.page.blocks import (
    Block,
    Chart,
    Collapsed,
    Section,
    Table,
    Text,
    bars,
    cell,
    limit_line,
    percent,
    rows_layout,
    size,
    stars,
    table,
)
from flagcore.report.page.run import Record, RunData, measured_s, memory_of, served, time_parts
from flagcore.report.result import number

LEVELS = NAMES["memory_levels"]
MEASURED = {name: f"{name.removesuffix('_gib')}_bytes" for name in LEVELS} | {"reserved_gib": "peak_reserved_bytes"}
"""Names of the levels in a measurement."""
GIB = 2**30
STEP = (
    N_("Step time"),
    N_("Parts of the step time (predicted)"),
    N_("{name}: {part} takes {share:.1%} of a step of ~{seconds} s."),
)
REQUEST = (
    N_("Time of a request"),
    N_("Parts of the mean time of a request (predicted)"),
    N_("{name}: {part} takes {share:.1%} of a request of ~{seconds} s."),
)
"""Title, caption and summary of the parts of the time, for training and for servers."""


def memory(run: RunData) -> Section | None:
    """Return the memory of one device per stage of the best; None without a best."""
    if run.best is None:
        return None
    prediction, measured = memory_of(run.best), run.best.measurement
    stages = run.insight.get("stages") or []
    blocks: list[Block] = []
    if any(stage["components"] for stage in stages):
        title = _("By component and kind (predicted)")
        blocks += [_by_stage(run, stages, prediction), Collapsed("components", title, (_components(run, title),))]
    if prediction:
        sizes = {level: getattr(measured, name, None) for level, name in MEASURED.items()}
        used = {level: value / GIB for level, value in sizes.items() if value is not None}
        rows = [
            [_(text), size(prediction.get(level)), size(used.get(level))]
            for level, text in {**LEVELS, "capacity_gib": N_("capacity")}.items()
        ]
        caption = _("Device with the highest memory")
        if len(stages) > 1:
            caption = _("Device with the highest memory (stage {number})", number=prediction["worst_stage"])
        blocks.append(table(caption, [_("level"), _("~predicted"), _("measured, worst rank")], rows))
    else:
        blocks.append(Text(_("The memory was not predicted.")))
    if run.serves and prediction:
        parts = [
            [_(text), cell(prediction[name]) if name.endswith("tokens") else size(prediction[name])]
            for name, text in NAMES["serving_memory"].items()
            if name in prediction
        ]
        blocks.append(table(_("Parts"), [_("part"), _("size or tokens")], parts))
    return Section("memory", _("Memory"), blocks)


def _by_stage(run: RunData, stages: Sequence[Record], predicted: Record) -> Chart:
    names = [_("stage {number}", number=stage["stage"]) for stage in stages]
    groups = [
        memory_parts({**each, "activation_gib": each["peak_allocated_gib"] - each["static_gib"]}) for each in stages
    ]
    present = list(dict.fromkeys(name for each in groups for name in each))
    measured, level = _measured_by_stage(run, len(stages)), "device_used_gib"
    capacity = number(predicted.get("capacity_gib"))
    shapes = [] if capacity is None else [limit_line(_("capacity {size}", size=size_text(capacity)), capacity)]
    worst = max(stages, key=lambda stage: float(stage[level]))
    used = f"~{size_text(worst[level])}" + ("" if capacity is None else f" / {size_text(capacity)}")
    rows = [
        [
            cell(stage["stage"]),
            *(size(each.get(name)) for name in present),
            *(size(stage[name]) for name in LEVELS),
            *(size(figures.get(name)) for name in LEVELS),
        ]
        for stage, each, figures in zip(stages, groups, measured, strict=True)
    ]
    headings = [_("stage"), *(f"~{_(text)}" for text in (*present, *LEVELS.values()))]
    headings += [_("{level}, measured", level=_(text)) for text in LEVELS.values()]
    return Chart(
        title=_("Memory of a device by stage"),
        summary=_("Stage {number} needs the most memory: {used} (predicted).", number=worst["stage"], used=used),
        traces=[
            *(bars(_(n), p, [each.get(n, 0.0) for each in groups], names, width=0.5) for p, n in enumerate(present)),
            *stars(
                _("in use, measured"),
                [(each[level], name) for each, name in zip(measured, names, strict=True) if level in each],
            ),
        ],
        layout=rows_layout("GiB", len(stages), barmode="stack", xaxis={"rangemode": "tozero"}, shapes=shapes)
        | {"height": 190 + 46 * len(stages)},
        table=table(_("Memory of a device of each stage"), headings, rows),
    )


def _components(run: RunData, title: str) -> Table:
    stages, labels = run.insight["stages"], run.labels
    names = {**NAMES["component_states"], "activation_gib": N_("activations")}
    keys = [key for key in names if any(key in part for stage in stages for part in stage["components"].values())]
    rows = [
        [cell(stage["stage"]), labels.components.get(name, name), *(size(parts[name].get(key)) for key in keys)]
        for stage in stages
        for parts in [stage["components"]]
        for name in by_component(parts, labels)
    ]
    return table(title, [_("stage"), _("component"), *(_(names[key]) for key in keys)], rows, sortable=True)


def _measured_by_stage(run: RunData, count: int) -> list[dict[str, float]]:
    """Return the maximum of the measured figures over the ranks of each stage; ranks are in the order of stages."""
    found: list[dict[str, float]] = [{} for _ in range(count)]
    ranks = run.metrics(run.best).get("ranks") if run.best and run.best.measurement else None
    if not isinstance(ranks, list) or not ranks or len(ranks) % count:
        return found
    for place, rank in enumerate(ranks):
        largest = found[place // (len(ranks) // count)]
        for level, key in MEASURED.items():
            figure = number(lookup(rank, key))
            if figure is not None:
                largest[level] = max(largest.get(level, 0.0), figure / GIB)
    return found


def step_time(run: RunData) -> Section | None:
    """Return the parts of the step time of the best and the baseline; None without a prediction."""
    trials = {_(name): trial for name, trial in (("best", run.best), ("baseline", run.baseline)) if trial}
    if run.best and run.baseline and run.best.candidate == run.baseline.candidate:
        del trials[_("baseline")]
    predicted_trials = {name: trial for name, trial in trials.items() if time_parts(trial)}
    if not predicted_trials:
        return None
    blocks: list[Block] = [_step_parts(run, predicted_trials)]
    measured_rows = [[name, *figures] for name, trial in trials.items() if (figures := _measured_parts(run, trial))]
    if measured_rows:
        headings = [_("trial"), *(_(text) for text in run.labels.measured_parts.values()), _("step s")]
        blocks.append(table(_("Measured by the trial program, median over steps"), headings, measured_rows))
    return Section("step", _((REQUEST if run.serves else STEP)[0]), blocks)


def _step_parts(run: RunData, trials: Mapping[str, Trial]) -> Chart:
    _title, title, summary = REQUEST if run.serves else STEP
    times = {name: time_parts(trial) for name, trial in trials.items()}
    totals = {name: sum(time.values()) for name, time in times.items()}
    # of a server the mean of a request
    steps = {n: served(trial, "e2e_s.mean") if run.serves else measured_s(trial) for n, trial in trials.items()}
    traces, rows = list[dict[str, Any]](), list[list[Any]]()
    for place, part in enumerate(dict.fromkeys(part for time in times.values() for part in time)):
        seconds, name = {each: float(time.get(part, 0.0)) for each, time in times.items()}, _(part_name(part))
        shares = [(cell(s), percent(s / totals[each] if totals[each] else 0.0)) for each, s in seconds.items()]
        rows.append([name, *(each for pair in shares for each in pair)])
        if any(seconds.values()):
            traces.append(bars(name, place, list(seconds.values()), list(times), width=0.5))
    for name, figures in ((_("predicted"), totals), (_("measured"), steps)):
        rows.append([name, *(each for figure in figures.values() for each in (cell(figure), cell(None)))])
    traces += stars(_("measured"), [(step, name) for name, step in steps.items() if step is not None])
    first, time = next(iter(times.items()))
    largest = max(time, key=lambda part: float(time[part]))
    share = time[largest] / (totals[first] or 1.0)
    names = {"name": first.capitalize(), "part": _(part_name(largest)), "seconds": shown(totals[first])}
    return Chart(
        title=_(title),
        summary=_(summary, **names, share=share),
        traces=traces,
        layout=rows_layout(_("seconds"), len(times), each=60, barmode="stack") | {"height": 240 + 50 * len(times)},
        table=table(_(title), [_("part"), *(heading for name in times for heading in (f"~{name}, s", "~%"))], rows),
    )


def _measured_parts(run: RunData, trial: Trial) -> list[Any]:
    """Return the medians of the measured parts of a step after the warm-up; empty without a measurement."""
    count = len(trial.measurement.step_times_s) if trial.measurement else 0
    steps, parts = run.metrics(trial).get("steps"), run.labels.measured_parts
    if not count or not isinstance(steps, list) or trial.fidelity != RUN or not parts:
        return []
    counted_steps = [step for step in steps if isinstance(step, Mapping)][-count:]
    figures = [[each for step in counted_steps if (each := number(step.get(key))) is not None] for key in parts]
    if not counted_steps or any(len(values) < len(counted_steps) for values in figures):
        return []
    return [*map(median, figures), measured_s(trial)]
