"""The kinds of chips of a mixed cluster: their stages and layers in the best configuration, and how long they idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.prediction import Passes
from flagcore.i18n import _, ngettext
from flagcore.report.formats import shown
from flagcore.report.page.blocks import Chart, Section, Table, cell, highlighted, percent, size, table
from flagcore.report.page.charts import bars, rows_layout
from flagcore.report.page.run import Record, RunData, configuration
from flagcore.report.page.timeline import passes_of

IDLE = 6
"""The series of idle time, grey."""


def kinds(run: RunData) -> Section | None:
    """Return the stages by kind of chip of the best configuration; None with one node group, or without a best."""
    chips, passes = run.insight.get("chips") or [], passes_of(run)
    if len(chips) < 2 or run.best is None or passes is None or not passes.groups:
        return None
    names = [str(chip.get("title") or chip["name"]) for chip in chips]
    blocks = (_plan(run, run.best, passes, names), _of_each(passes, chips, names))
    return Section(anchor="kinds", title=_("Kinds of chips"), blocks=blocks)


def _plan(run: RunData, best: Record, passes: Passes, names: Sequence[str]) -> Chart:
    """Return each stage with its kind and layers, and its busy and idle seconds in a step."""
    sums = [forward + backward for forward, backward in zip(passes.forward_s, passes.backward_s, strict=True)]
    busy, places = [passes.microbatches * each for each in sums], range(len(sums))
    rows = [_row(place, passes.layers) for place in places]
    traces = []
    for number, name in enumerate(names):
        own = [place for place in places if passes.groups[place] == number]
        if own:
            traces.append(bars(name, number, [busy[place] for place in own], [rows[place] for place in own], width=0.6))
    idle_s = [share * (passes.predicted_s or 0.0) for share in passes.idle]
    if idle_s:
        traces.append(bars(_("idle"), IDLE, idle_s, rows, width=0.6))
    return Chart(
        title=_("Stages of the best configuration by kind of chip (predicted)"),
        summary=_(
            "{configuration}: the slowest stage takes ~{seconds} s per micro-batch, on {name}.",
            configuration=configuration(run, best),
            seconds=shown(max(sums)),
            name=names[passes.groups[sums.index(max(sums))]],
        ),
        traces=tuple(traces),
        layout=rows_layout(
            _("time in the step, s"),
            len(rows),
            barmode="stack",
            yaxis={"categoryorder": "array", "categoryarray": rows},
        ),
        table=_of_stages(run, passes, names),
    )


def _row(place: int, layers: Sequence[int]) -> str:
    stage = _("stage {number}", number=place)
    return f"{stage}: " + ngettext("{count} layer", "{count} layers", layers[place]) if layers else stage


def _of_stages(run: RunData, passes: Passes, names: Sequence[str]) -> Table:
    stages = {int(each["stage"]): each for each in run.insight.get("stages") or []}
    rows = [
        [
            cell(place),
            names[group],
            cell(passes.layers[place] if passes.layers else None),
            highlighted(passes.forward_s[place]),
            highlighted(passes.backward_s[place]),
            size(stages.get(place, {}).get("device_used_gib"), "~"),
            percent(passes.idle[place] if passes.idle else None, "~"),
        ]
        for place, group in enumerate(passes.groups)
    ]
    headings = [_("stage"), _("chip"), _("layers"), _("~forward, s"), _("~backward, s"), _("~in use"), _("~idle, %")]
    return table(_("Each stage: seconds per micro-batch, memory of a device, and idle time"), headings, rows)


def _of_each(passes: Passes, chips: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """Return the devices, stages, layers and idle share of each kind."""
    rows = []
    for number, (chip, name) in enumerate(zip(chips, names, strict=True)):
        own = [place for place, group in enumerate(passes.groups) if group == number]
        rows.append(
            [
                name,
                cell(chip["nodes"] * chip["devices_per_node"]),
                cell(len(own)),
                cell(sum(passes.layers[place] for place in own) if passes.layers else None),
                percent(passes.idle_of(number), "~"),
            ]
        )
    headings = [_("chip"), _("devices"), _("stages"), _("layers"), _("~idle, %")]
    return table(_("Each kind: idle is the share of the pipeline's time without work"), headings, rows)
