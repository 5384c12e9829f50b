"""The section with the pipeline schedule as a timeline of passes, and the time and chip of each stage."""

from collections.abc import Sequence
from typing import Any

from flagcore.domain.prediction import Passes
from flagcore.errors import NotModelled
from flagcore.i18n import _
from flagcore.physics.pipelines import SCHEDULES, ExecutedPass, simulate, step_seconds
from flagcore.report.formats import NAMES, shown
from flagcore.report.page.blocks import Block, Chart, Section, Table, Text, bars, percent, rows_layout, table
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
    """Return the section with the timelines of the best configuration, or None if it has no pipeline.

    With several kinds of chips, replicas without a pipeline are included.
    """
    chips = [str(chip.get("title") or chip["name"]) for chip in run.insight.get("chips") or ()]
    chips = chips if len(chips) > 1 else []
    blocks = [
        block
        for passes in _pipelines(run)
        if len(passes.forward_s) > 1 or (chips and passes.groups)
        for block in Timeline(passes, chips).blocks()
    ]
    return Section("pipeline", _("Pipeline"), blocks) if blocks else None


def _pipelines(run: RunData) -> list[Passes]:
    """Return the passes of each different pipeline of the best configuration. It is empty if they are unknown."""
    found: list[dict[str, Any]] = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        for data in run.insight.get("pipelines") or ()
    ]
    return [Passes(**fields) for fields in found]


class Timeline:
    """The timeline of one pipeline's passes. It has `count` stages on as many devices.

    `chips`: the names of the kinds of chips. Empty if there is only one.
    """

    def __init__(self, passes: Passes, chips: Sequence[str] = ()) -> None:
        self.chips = [chips[group] for group in passes.groups] if chips else []
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
        if self.count < 2:
            return [self._seconds(self.passes.microbatches)]
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
        """Return a table with the chip, the seconds per micro-batch and the busy time of each device.

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
        about = {_("chip"): self.chips, _("layers"): passes.layers} if self.chips else {}
        known = {heading: values for heading, values in about.items() if values}
        for row, *values in zip(cells, *known.values(), strict=True):
            row[1:1] = values
        return table(caption, [_("stage"), *known, *headings], cells)

    def _micro_batches(self, counted: int) -> str:
        if counted < self.passes.microbatches:
            return _("{count} of {total} micro-batches", count=counted, total=self.passes.microbatches)
        return _("{count} micro-batches", count=counted)
