"""The kinds of chips of a mixed cluster: their stages and layers in the best configuration, and how long they idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.domain.prediction import Passes, idle_of, longest
from flagcore.i18n import _, ngettext
from flagcore.report.formats import shown
from flagcore.report.page.blocks import Chart, Section, Table, cell, highlighted, percent, size, table
from flagcore.report.page.charts import bars, rows_layout
from flagcore.report.page.run import Record, RunData, configuration
from flagcore.report.page.timeline import kind_names, pipelines_of

IDLE = 6
"""The series of idle time, grey."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage of a pipeline: its kind, and the seconds of its passes per micro-batch and in a step."""

    kind: int
    layers: int | None
    forward_s: float
    backward_s: float
    busy_s: float
    idle: float | None


def kinds(run: RunData) -> Section | None:
    """Return the stages by kind of chip of the best configuration; None with one node group, or without a best."""
    chips, pipelines = run.insight.get("chips") or [], pipelines_of(run)
    if len(chips) < 2 or run.best is None or not pipelines or not all(each.groups for each in pipelines):
        return None
    stages, names = _stages(pipelines), kind_names(run)
    blocks = (_plan(run, run.best, stages, names, longest(pipelines)), _of_each(stages, pipelines, chips, names))
    return Section(anchor="kinds", title=_("Kinds of chips"), blocks=blocks)


def _stages(pipelines: Sequence[Passes]) -> list[_Stage]:
    """Return the stages of all pipelines, one after the other."""
    seconds, stages = longest(pipelines), []
    for each in pipelines:
        none = (None,) * len(each.groups)
        rows = zip(
            each.groups,
            each.layers or none,
            each.forward_s,
            each.backward_s,
            each.idle(seconds) if seconds else none,
            strict=True,
        )
        stages += [_Stage(k, n, f, b, each.microbatches * (f + b), idle) for k, n, f, b, idle in rows]
    return stages


def _plan(run: RunData, best: Record, stages: Sequence[_Stage], names: Sequence[str], seconds: float | None) -> Chart:
    """Return each stage with its kind and layers, and its busy and idle seconds in a step."""
    rows = [_row(place, stage) for place, stage in enumerate(stages)]
    traces = []
    for number, name in enumerate(names):
        own = [(stage.busy_s, row) for stage, row in zip(stages, rows, strict=True) if stage.kind == number]
        if own:
            traces.append(bars(name, number, [busy for busy, _ in own], [row for _, row in own], width=0.6))
    if seconds:
        idle_s = [seconds * (stage.idle or 0.0) for stage in stages]
        traces.append(bars(_("idle"), IDLE, idle_s, rows, width=0.6))
    slowest = max(stages, key=lambda stage: stage.busy_s)
    return Chart(
        title=_("Stages of the best configuration by kind of chip (predicted)"),
        summary=_(
            "{configuration}: the slowest stage is busy for ~{seconds} s of a step, on {name}.",
            configuration=configuration(run, best),
            seconds=shown(slowest.busy_s),
            name=names[slowest.kind],
        ),
        traces=tuple(traces),
        layout=rows_layout(
            _("time in the step, s"),
            len(rows),
            barmode="stack",
            yaxis={"categoryorder": "array", "categoryarray": rows},
        ),
        table=_of_stages(run, stages, names),
    )


def _row(place: int, stage: _Stage) -> str:
    name = _("stage {number}", number=place)
    return name if stage.layers is None else f"{name}: " + ngettext("{count} layer", "{count} layers", stage.layers)


def _of_stages(run: RunData, stages: Sequence[_Stage], names: Sequence[str]) -> Table:
    memory = {int(each["stage"]): each for each in run.insight.get("stages") or []}
    rows = [
        [
            cell(place),
            names[stage.kind],
            cell(stage.layers),
            highlighted(stage.forward_s),
            highlighted(stage.backward_s),
            size(memory.get(place, {}).get("device_used_gib"), "~"),
            percent(stage.idle, "~"),
        ]
        for place, stage in enumerate(stages)
    ]
    headings = [_("stage"), _("chip"), _("layers"), _("~forward, s"), _("~backward, s"), _("~in use"), _("~idle, %")]
    return table(_("Each stage: seconds per micro-batch, memory of a device, and idle time"), headings, rows)


def _of_each(
    stages: Sequence[_Stage], pipelines: Sequence[Passes], chips: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Table:
    """Return the devices, stages, layers and idle share of each kind."""
    rows = []
    for number, (chip, name) in enumerate(zip(chips, names, strict=True)):
        own = [stage for stage in stages if stage.kind == number]
        layers = [stage.layers for stage in own if stage.layers is not None]
        rows.append(
            [
                name,
                cell(chip["nodes"] * chip["devices_per_node"]),
                cell(len(own)),
                cell(sum(layers) if len(layers) == len(own) else None),
                percent(idle_of(pipelines, number), "~"),
            ]
        )
    headings = [_("chip"), _("devices"), _("stages"), _("layers"), _("~idle, %")]
    return table(_("Each kind: idle is the share of the pipeline's time without work"), headings, rows)
