"""Sections with the pipeline schedule as a timeline of passes, and with the stages of each kind of chip."""

from collections.abc import Sequence
from typing import Any

from flagcore.domain.prediction import Passes, longest
from flagcore.errors import NotModelled
from flagcore.i18n import _
from flagcore.physics.pipelines import SCHEDULES, ExecutedPass, simulate, step_seconds
from flagcore.report.formats import NAMES, shown
from flagcore.report.page.blocks import (
    Block,
    Chart,
    Section,
    Table,
    Text,
    bars,
    highlighted,
    percent,
    rows_layout,
    size,
    table,
)
from flagcore.report.page.run import RunData

KINDS = NAMES["passes"]
MAX_PASSES = 4200
"""The maximum number of passes in a timeline. More would be indistinguishable, and slow in browsers."""
MAX_SIMULATED = 50_000
"""The maximum number of passes that are simulated to get the idle time of stages. For longer steps, the drawn part is
representative."""
MAX_DETAILED = 400
"""The maximum number of passes that have patterns, outlines and numbers. On narrower bars, they cannot be seen."""
HIGH = 0.85
"""The height of a bar as a share of its row."""
LAYOUT: dict[str, Any] = {"barmode": "overlay", "uniformtext": {"mode": "hide", "minsize": 8}}


def pipeline(run: RunData) -> Section | None:
    """Return the section with the timelines of the best configuration, or None if it has no pipeline."""
    pipelines = _pipelines(run)
    blocks: list[Block] = []
    for passes in pipelines:
        if len(passes.forward_s) > 1:
            blocks += [Text(_chip_names(run)[passes.groups[0]])] if len(pipelines) > 1 else []
            blocks += Timeline(passes).blocks()
    return Section("pipeline", _("Pipeline"), blocks) if blocks else None


def _pipelines(run: RunData) -> list[Passes]:
    """Return the passes of each different pipeline of the best configuration. It is empty if they are unknown."""
    found: list[dict[str, Any]] = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        for data in run.insight.get("pipelines") or ()
    ]
    return [Passes(**fields) for fields in found]


def _chip_names(run: RunData) -> list[str]:
    """Return the names of the node groups."""
    return [str(chip.get("title") or chip["name"]) for chip in run.insight.get("chips") or ()]


class Timeline:
    """The timeline of one pipeline's passes. It has `count` stages on as many devices."""

    def __init__(self, passes: Passes) -> None:
        self.passes, self.schedule, self.count = passes, SCHEDULES[passes.schedule], len(passes.forward_s)
        parts = self.schedule.parts or passes.virtual
        self.passes_per_microbatch = (3 if self.schedule.splits_backward else 2) * self.count * parts

    def microbatches_to_show(self) -> int | None:
        """Return the number of micro-batches that show the start, the middle and the end of a step.

        Returns None if they have more than `MAX_PASSES` passes.
        """
        number = min(self.passes.microbatches, max(2 * self.count, 8))
        if self.passes.virtual > 1:
            number = min(self.passes.microbatches, -(-number // self.count) * self.count)
        return number if self.passes_per_microbatch * number <= MAX_PASSES else None

    def blocks(self) -> list[Block]:
        """Return the chart, or why there is none, and the seconds per micro-batch."""
        number = self.microbatches_to_show()
        text = _("No timeline: {count} stages have too many passes to draw.", count=self.count)
        if number is not None:
            try:
                return [self._chart(number)]
            except NotModelled as error:
                text = _("No timeline: {reason}.", reason=error)
        return [Text(text), self._seconds(self.passes.microbatches)]

    def _chart(self, number: int) -> Chart:
        passes, drawn = self.passes, simulate(self.passes, number)
        is_short = self.passes_per_microbatch * passes.microbatches <= MAX_SIMULATED
        counted = passes.microbatches if is_short else number
        simulated = drawn if counted == number else simulate(passes, counted)
        step = step_seconds(passes, simulated)
        data = self._seconds(counted, simulated, step)
        name = "1f1b" if passes.schedule == "interleaved" and passes.virtual < 2 else passes.schedule
        parts = [_("Schedule: {name}", name=name), _("{count} stages", count=self.count)]
        if passes.virtual > 1:
            parts.append(_("{count} virtual stages per device", count=passes.virtual))
        parts.append(self._micro_batches(counted))
        idle = max(float(row[-1].value or 0.0) for row in data.rows)
        summary = [f"{', '.join(parts)}.", _("Largest idle time: {share:.1%}.", share=idle)]
        if counted == passes.microbatches:
            times = {"seconds": shown(step), "formula": shown(passes.predicted_s)}
            summary.append(_("Simulated step: {seconds} s; formula: {formula} s.", **times))
            if self.schedule.post_validation:
                text = _("Stages do not wait for each other before the optimizer, so the longest stage counts.")
                summary.append(text)
        if number < passes.microbatches:
            summary.append(_("Shown: a step of {count} micro-batches.", count=number))
        if has_details := len(drawn) <= MAX_DETAILED:
            summary.append(_("Numbers are micro-batches."))
        of_kinds = [[each for each in drawn if each.kind == kind and each.end_s > each.start_s] for kind in KINDS]
        return Chart(
            title=_("Forward and backward passes of each stage (predicted)"),
            summary=" ".join(summary),
            traces=[self._bars(n, some, has_details) for n, some in enumerate(of_kinds) if some],
            layout=rows_layout(_("time in the step, s"), self.count, each=30, **LAYOUT),
            table=data,
        )

    def _bars(self, series: int, of_kind: Sequence[ExecutedPass], has_details: bool) -> dict[str, Any]:
        """Return the bars for passes of one kind."""
        trace = bars(
            _(KINDS[of_kind[0].kind]),
            series,
            [each.end_s - each.start_s for each in of_kind],
            [_("stage {number}", number=each.device) for each in of_kind],
            base=[each.start_s for each in of_kind],
            hoverinfo="name",
            width=HIGH,
        )
        if has_details:
            trace["marker"]["line"] = {"width": 1, "color": "#ffffff"}
            numbers = [str(each.microbatch) for each in of_kind]
            trace |= {"text": numbers, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
            trace |= {"textfont": {"color": "#000000", "size": 12}}
        else:
            trace["marker"] |= {"line": {"width": 0}, "pattern": {"shape": ""}}
        return trace

    def _seconds(self, counted: int, played: Sequence[ExecutedPass] = (), step: float = 0.0) -> Table:
        """Return a table with the seconds per micro-batch and the busy time of each device.

        If the step was simulated (`played`), the table also has the idle time.
        """
        passes = self.passes
        columns: dict[str, Sequence[float]] = {_("~forward, s"): passes.forward_s, _("~backward, s"): passes.backward_s}
        if self.schedule.splits_backward:
            columns[_("~weight gradients, s")] = passes.weight_s
        if passes.paired_s:
            columns[_("~concurrent, s")] = passes.paired_s
        rows, headings = zip(*columns.values(), strict=True), [*columns, _("~busy, s")]
        cells = [[place, *row, counted * (row[0] + row[1])] for place, row in enumerate(rows)]
        if played:
            headings += [_("~idle, s"), _("~idle, %")]
            busy_s = [0.0] * self.count
            for each in played:
                busy_s[each.device] += each.end_s - each.start_s
            for row, busy in zip(cells, busy_s, strict=True):
                row[-1:] = [busy, step - busy, percent((step - busy) / step)]
        caption = _(
            "Seconds per micro-batch, and busy over {micro_batches}; a message takes {seconds} s",
            micro_batches=self._micro_batches(counted),
            seconds=shown(passes.send_s),
        )
        return table(caption, [_("stage"), *headings], cells)

    def _micro_batches(self, counted: int) -> str:
        if counted < self.passes.microbatches:
            return _("{count} of {total} micro-batches", count=counted, total=self.passes.microbatches)
        return _("{count} micro-batches", count=counted)


def kinds(run: RunData) -> Section | None:
    """Return the section on the stages of the best configuration by kind of chip.

    Returns None if there is only one node group, or no best.
    """
    chips, pipelines = run.insight.get("chips") or [], _pipelines(run)
    if len(chips) < 2 or run.best is None or not pipelines or not all(each.groups for each in pipelines):
        return None
    names, seconds = _chip_names(run), longest(pipelines)
    memory = {int(each["stage"]): each["device_used_gib"] for each in run.insight.get("stages") or []}
    rows, busy_s = list[list[Any]](), list[tuple[float, str]]()
    for each in pipelines:
        unknown = (None,) * len(each.groups)
        idle, all_layers = each.idle(seconds) if seconds else unknown, each.layers or unknown
        stages = zip(each.groups, all_layers, each.forward_s, each.backward_s, idle, strict=True)
        for group, layers, *times, share in stages:
            used = size(memory.get(len(rows)), "~")
            rows.append([len(rows), names[group], layers, *map(highlighted, times), used, percent(share, "~")])
            busy_s.append((each.microbatches * sum(times), names[group]))
    slowest_s, slowest = max(busy_s)
    text = _(
        "{configuration}: the slowest stage is busy for ~{seconds} s of a step, on {name}.",
        configuration=run.configuration(run.best),
        seconds=shown(slowest_s),
        name=slowest,
    )
    headings = [_("stage"), _("chip"), _("layers"), _("~forward, s"), _("~backward, s"), _("~in use"), _("~idle, %")]
    by_stage = table(_("Each stage: seconds per micro-batch, memory of a device, and idle time"), headings, rows)
    return Section("kinds", _("Kinds of chips"), (Text(text), by_stage))
