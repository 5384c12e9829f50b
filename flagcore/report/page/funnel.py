"""How the rules reduced the search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagcore.domain.plan import Counts
from flagcore.i18n import _
from flagcore.report.page.blocks import Chart, Section, Text, cell, table
from flagcore.report.page.charts import MARGIN, bars, label, rows_layout
from flagcore.report.page.run import RunData
from flagcore.report.text import Removed, funnel_stages, lost_repeats, repeats_text


def funnel(run: RunData) -> Section:
    """Return the counts from all combinations to the candidates, and from these to the untried ones."""
    counts, says = Counts(**run.result["counts"]), run.insight.get("says", {})
    illegal, states = funnel_stages(counts, run.fidelity)
    combinations, candidates = (_("combinations"), counts.combinations), (_("candidates"), counts.candidates)
    blocks = (
        _chart(_("From combinations to candidates"), combinations, illegal, candidates, says),
        _chart(_("States of the candidates"), candidates, states, (_("untried"), counts.untried), says),
    )
    notes = (Text(line) for line in repeats_text(lost_repeats(run.result)))
    return Section(anchor="funnel", title=_("Search space"), blocks=(*blocks, *notes))


def _chart(
    title: str, start: tuple[str, int], removed: Sequence[Removed], end: tuple[str, int], says: Mapping[str, str]
) -> Chart:
    data = table(
        _("{title}; removed counts are negative", title=title),
        [_("stage"), _("number"), _("why")],
        [
            [*start, ""],
            *([name, cell(-count), says.get(rule, "")] for rule, name, count in removed),
            [*end, ""],
        ],
    )
    drawn = [(name, count) for _, name, count in removed if count]
    names = [start[0], *(name for name, _ in drawn), end[0]]
    counts = [count for _, count in drawn]
    left = [start[1] - sum(counts[:place]) for place in range(len(counts) + 1)]
    text = [f"{start[1]:,}", *(f"-{count:,}" for count in counts), f"{end[1]:,}"]
    beside = {"text": text, "textposition": "outside", "cliponaxis": False}
    lines = max(label(name).count("<br>") + 1 for name in names)
    summary = f"{start[0]}: {start[1]:,}; {end[0]}: {end[1]:,}."
    if drawn:
        name, count = max(drawn, key=lambda each: each[1])
        summary += " " + _('Largest group removed: "{name}", {count:,}.', name=name, count=count)
    return Chart(
        title=title,
        summary=summary,
        traces=(
            bars(_("left"), 0, [*left, end[1]], names),
            bars(_("removed"), 1, [0, *counts, 0], names, **beside),
        ),
        layout=rows_layout(
            start[0], len(names), each=14 + 15 * lines, barmode="stack", xaxis={"range": [0, max(start[1], 1)]}
        )
        | {"margin": MARGIN | {"r": 8 * max(map(len, text)) + 6}},
        table=data,
    )
