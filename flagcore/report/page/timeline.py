"""The pipeline schedule as a timeline of passes, and the stages by kind of chip on a mixed cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagcore.domain.prediction import Passes, idle_of, longest
from flagcore.errors import NotModelled
from flagcore.i18n import _, ngettext
from flagcore.physics.schedules.catalogue import SCHEDULES
from flagcore.physics.schedules.replay import ExecutedPass, simulate, step_seconds
from flagcore.report.formats import NAMES, shown
from flagcore.report.page.blocks import (
    Block,
    Chart,
    Section,
    Table,
    Text,
    bars,
    cell,
    highlighted,
    percent,
    rows_layout,
    size,
    table,
)
from flagcore.report.page.run import RunData, configuration
from flagcore.report.result import TrialResult

KINDS = NAMES["passes"]
MAX_PASSES = 4200
"""Maximum number of passes in a timeline: more are indistinguishable, and slow in browsers."""
MAX_SIMULATED = 50_000
"""Maximum number of passes to simulate for the idle time of stages; the drawn part represents longer steps."""
MAX_NUMBERED = 300
"""Maximum number of passes for outlines and numbers of micro-batches."""
MAX_PATTERNED = 600
"""Maximum number of passes with patterns. Patterns of narrow bars cannot be seen, and make a printed page large."""
HIGH = 0.85
"""The height of a bar as a share of its row."""
LAYOUT: dict[str, Any] = {"barmode": "overlay", "uniformtext": {"mode": "hide", "minsize": 8}}


def pipeline(run: RunData) -> Section | None:
    """Return the timelines of the best configuration; None without pipelines."""
    pipelines = pipelines_of(run)
    blocks: list[Block] = []
    for passes in pipelines:
        if len(passes.forward_s) > 1:
            if len(pipelines) > 1:
                blocks.append(Text(kind_names(run)[passes.groups[0]]))
            blocks += _blocks(passes)
    return Section(anchor="pipeline", title=_("Pipeline"), blocks=tuple(blocks)) if blocks else None


def pipelines_of(run: RunData) -> list[Passes]:
    """Return the passes of each different pipeline of the best configuration; empty if they are unknown."""
    return [_passes(data) for data in run.insight.get("pipelines") or ()]


def _passes(data: dict[str, Any]) -> Passes:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Passes(**fields)


def kind_names(run: RunData) -> list[str]:
    """Return the names of the node groups."""
    return [str(chip.get("title") or chip["name"]) for chip in run.insight.get("chips") or ()]


def microbatches_to_show(passes: Passes, most: int) -> int | None:
    """Return the number of micro-batches that show the start, the middle and the end of a step; None for more than
    `most` passes.
    """
    count = len(passes.forward_s)
    number = min(passes.microbatches, max(2 * count, 8))
    if passes.virtual > 1:
        number = min(passes.microbatches, -(-number // count) * count)
    return number if _passes_per_microbatch(passes) * number <= most else None


def _passes_per_microbatch(passes: Passes) -> int:
    """Return the largest number of passes of a micro-batch."""
    schedule = SCHEDULES[passes.schedule]
    parts = 1 if schedule.copies > 1 else schedule.parts or passes.virtual
    return (3 if schedule.splits_backward else 2) * len(passes.forward_s) * parts


def _blocks(passes: Passes) -> tuple[Block, ...]:
    number = microbatches_to_show(passes, MAX_PASSES)
    if SCHEDULES[passes.schedule].splits_backward and not passes.weight_s:
        text = _("No timeline: insight.json of this run is of an earlier version. Delete it to predict the run again.")
    elif number is None:
        text = _("No timeline: {count} stages have too many passes to draw.", count=len(passes.forward_s))
    else:
        try:
            return (_timeline(passes, number),)
        except NotModelled as error:
            text = _("No timeline: {reason}.", reason=error)
    return Text(text), _seconds(passes, passes.microbatches)


def _timeline(passes: Passes, number: int) -> Chart:
    simulated, count = simulate(passes, number), len(passes.forward_s)
    simulated_count = (
        passes.microbatches if _passes_per_microbatch(passes) * passes.microbatches <= MAX_SIMULATED else number
    )
    simulation = simulate(passes, simulated_count) if simulated_count != number else simulated
    step, paired = step_seconds(passes, simulation), any(each.lane for each in simulated)
    by_kind = {kind: [each for each in simulated if each.kind == kind and each.end_s > each.start_s] for kind in KINDS}
    traces = [
        _bars(passes, series, kind, of_kind, len(simulated), paired)
        for series, (kind, of_kind) in enumerate(by_kind.items())
        if of_kind
    ]
    data = _seconds(passes, simulated_count, simulation, step)
    idle = max(float(row[-1].value or 0.0) for row in data.rows)
    summary = [*_idle_text(passes, simulated_count, idle), *_durations(passes, simulated_count, step)]
    if number < passes.microbatches:
        summary.append(_("Shown: a step of {count} micro-batches.", count=number))
    if paired:
        summary.append(_("Forward and backward passes above each other run concurrently."))
    if SCHEDULES[passes.schedule].copies > 1:
        first = number - number // 2
        summary.append(_("Micro-batches from {number} on run from the last device to the first.", number=first))
    if len(simulated) <= MAX_NUMBERED:
        summary.append(_("Numbers are micro-batches."))
        summary += [_("A prime, as in 1′, marks the second part of a stage.")] * _has_two_parts(passes)
    return Chart(
        title=_("Forward and backward passes of each stage (predicted)"),
        summary=" ".join(summary),
        traces=tuple(traces),
        layout=rows_layout(_("time in the step, s"), count, each=44 if paired else 30, **LAYOUT),
        table=data,
    )


def _bars(
    passes: Passes, series: int, kind: str, of_kind: Sequence[ExecutedPass], among: int, paired: bool
) -> dict[str, Any]:
    trace = bars(
        _(KINDS[kind]),
        series,
        [each.end_s - each.start_s for each in of_kind],
        [_row(passes, each.device) for each in of_kind],
        base=[each.start_s for each in of_kind],
        hovertext=[_hover(passes, each) for each in of_kind],
        hoverinfo="text",
        width=[HIGH / 2.0 if each.lane else HIGH for each in of_kind] if paired else HIGH,
    )
    if paired:
        trace["offset"] = [0.0 if each.lane > 0 else -HIGH / 2.0 for each in of_kind]
    has_numbers = among <= MAX_NUMBERED
    trace["marker"] |= {"line": {"width": 1 if has_numbers else 0, "color": "#ffffff"}}
    if among > MAX_PATTERNED:
        trace["marker"] |= {"pattern": {"shape": ""}}
    if has_numbers:
        two_parts, count = _has_two_parts(passes), len(passes.forward_s)
        numbers = [f"{each.microbatch}{'′' * (two_parts and each.part >= count)}" for each in of_kind]
        trace |= {"text": numbers, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        trace |= {"textfont": {"color": "#000000", "size": 12}}
    return trace


def _idle_text(passes: Passes, counted: int, idle: float) -> list[str]:
    schedule = "1f1b" if passes.schedule == "interleaved" and passes.virtual < 2 else passes.schedule
    count = len(passes.forward_s)
    parts = [_("Schedule: {name}", name=schedule)]
    parts.append(_("{count} devices", count=count) if _is_mirrored(passes) else _("{count} stages", count=count))
    if passes.virtual > 1 and not _is_mirrored(passes):
        parts.append(_("{count} virtual stages per device", count=passes.virtual))
    parts.append(_micro_batches(passes, counted))
    return [f"{', '.join(parts)}.", _("Largest idle time: {share:.1%}.", share=idle)]


def _durations(passes: Passes, counted: int, step: float) -> list[str]:
    """Return the simulated duration of a step, and the duration by the engine's formula."""
    if counted < passes.microbatches:
        return []
    formula = shown(passes.predicted_s)
    summary = [_("Simulated step: {seconds} s; formula: {formula} s.", seconds=shown(step), formula=formula)]
    if SCHEDULES[passes.schedule].post_validation:
        summary.append(_("Stages do not wait for each other before the optimizer, so the longest stage counts."))
    return summary


def _seconds(passes: Passes, counted: int, played: Sequence[ExecutedPass] = (), step: float = 0.0) -> Table:
    """Return the seconds per micro-batch and the busy time of each device and, of a simulated step, its idle time."""
    columns: dict[str, Sequence[float]] = {_("~forward, s"): passes.forward_s, _("~backward, s"): passes.backward_s}
    if SCHEDULES[passes.schedule].splits_backward and passes.weight_s:
        columns[_("~weight gradients, s")] = passes.weight_s
    if passes.paired_s:
        columns[_("~concurrent, s")] = passes.paired_s
    if SCHEDULES[passes.schedule].copies > 1:
        columns = {
            name: [(one + two) / 2.0 for one, two in zip(s, s[::-1], strict=True)] for name, s in columns.items()
        }
    busy_s = [counted * (forward + backward) for forward, backward in zip(*list(columns.values())[:2], strict=True)]
    if played:
        busy_s = [0.0] * len(busy_s)
        for each in played:
            busy_s[each.device] += each.end_s - each.start_s if each.lane <= 0 else 0.0
    columns[_("~busy, s")] = busy_s
    if played:
        columns[_("~idle, s")] = [step - each for each in busy_s]
    rows: list[list[Any]] = [[cell(r), *map(cell, row)] for r, row in enumerate(zip(*columns.values(), strict=True))]
    if played:
        rows = [[*row, percent((step - each) / step)] for row, each in zip(rows, busy_s, strict=True)]
    return table(
        _(
            "Seconds per micro-batch, and busy over {micro_batches}; a message takes {seconds} s",
            micro_batches=_micro_batches(passes, counted),
            seconds=shown(passes.send_s),
        ),
        [_("device") if _is_mirrored(passes) else _("stage"), *columns, *[_("~idle, %")] * bool(played)],
        rows,
    )


def _micro_batches(passes: Passes, counted: int) -> str:
    if counted < passes.microbatches:
        return _("{count} of {total} micro-batches", count=counted, total=passes.microbatches)
    return _("{count} micro-batches", count=counted)


def _is_mirrored(passes: Passes) -> bool:
    """Return whether two stages of the model share two devices, as in DualPipe: rows are devices, not stages."""
    return SCHEDULES[passes.schedule].copies > 1


def _row(passes: Passes, device: int) -> str:
    return _("device {number}", number=device) if _is_mirrored(passes) else _("stage {number}", number=device)


def _has_two_parts(passes: Passes) -> bool:
    """Return whether a device has two parts of one copy of the model."""
    schedule = SCHEDULES[passes.schedule]
    return schedule.copies == 1 and (schedule.parts or passes.virtual) == 2


def _hover(passes: Passes, one: ExecutedPass) -> str:
    return _(
        "micro-batch {microbatch}, {kind}: part {part}, {row}",
        microbatch=one.microbatch,
        kind=_(KINDS[one.kind]),
        part=one.part % len(passes.forward_s) if _is_mirrored(passes) else one.part,
        row=_row(passes, one.device),
    )


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


def _plan(
    run: RunData, best: TrialResult, stages: Sequence[_Stage], names: Sequence[str], seconds: float | None
) -> Chart:
    """Return each stage with its kind and layers, and its busy and idle seconds in a step."""
    rows = [_stage_name(place, stage) for place, stage in enumerate(stages)]
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


def _stage_name(place: int, stage: _Stage) -> str:
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
