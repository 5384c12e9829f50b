"""How the rules reduced the search space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flagcore.domain.search_state import DOES_NOT_FIT
from flagcore.domain.trial import PROBE
from flagcore.i18n import _
from flagcore.report.page.blocks import Chart, Section, Text, cell, table
from flagcore.report.page.charts import MARGIN, bars, label, rows_layout
from flagcore.report.page.run import RunData
from flagcore.report.text import repeats_text


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of the funnel: how many it removes, and why."""

    name: str
    count: int
    why: str = ""


def funnel(run: RunData) -> Section:
    """Return the counts from all combinations to the candidates, and from these to the untried ones."""
    counts, says = run.result["counts"], run.insight.get("says", {})
    duplicates = _Stage(_("duplicates"), counts["merged"], _("the same configuration for the engine"))
    illegal = [_Stage(_("illegal: {rule}", rule=_(name)), *rest) for name, rest in _rules(counts["illegal"], says)]
    pruned = [_Stage(_("pruned: {rule}", rule=_(name)), *rest) for name, rest in _rules(counts["pruned"], says)]
    states = [
        _Stage(_("predicted not to fit"), counts["does_not_fit"], says.get(DOES_NOT_FIT, "")),
        *pruned,
        _Stage(_("probed") if run.fidelity == PROBE else _("measured"), counts["measured"]),
        _Stage(_("stopped early"), counts["stopped"]),
        _Stage(_("failed"), counts["failed"]),
    ]
    combinations = _Stage(_("combinations"), counts["combinations"])
    candidates, untried = _Stage(_("candidates"), counts["candidates"]), _Stage(_("untried"), counts["untried"])
    blocks = (
        _chart(_("From combinations to candidates"), combinations, [*illegal, duplicates], candidates),
        _chart(_("States of the candidates"), candidates, states, untried),
    )
    lost = {each["number"]: each["state"] for each in run.result.get("repeats") or () if not each["measured"]}
    notes = (Text(line) for line in repeats_text(lost))
    return Section(anchor="funnel", title=_("Search space"), blocks=(*blocks, *notes))


def _rules(counts: Mapping[str, int], says: Mapping[str, str]) -> Iterable[tuple[str, tuple[int, str]]]:
    for name, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        yield name, (count, says.get(name, ""))


def _chart(title: str, start: _Stage, removed: Sequence[_Stage], end: _Stage) -> Chart:
    data = table(
        _("{title}; removed counts are negative", title=title),
        [_("stage"), _("number"), _("why")],
        [
            [start.name, cell(start.count), ""],
            *([each.name, cell(-each.count), each.why] for each in removed),
            [end.name, cell(end.count), ""],
        ],
    )
    drawn = [each for each in removed if each.count]
    names = [start.name, *(each.name for each in drawn), end.name]
    left = [start.count]
    for each in drawn:
        left.append(left[-1] - each.count)
    text = [f"{start.count:,}", *(f"-{each.count:,}" for each in drawn), f"{end.count:,}"]
    beside = {"text": text, "textposition": "outside", "cliponaxis": False}
    lines = max(label(name).count("<br>") + 1 for name in names)
    summary = [f"{start.name}: {start.count:,}; {end.name}: {end.count:,}."]
    if drawn:
        largest = max(drawn, key=lambda each: each.count)
        summary.append(_('Largest group removed: "{name}", {count:,}.', name=largest.name, count=largest.count))
    return Chart(
        title=title,
        summary=" ".join(summary),
        traces=(
            bars(_("left"), 0, [*left, end.count], names),
            bars(_("removed"), 1, [0, *(each.count for each in drawn), 0], names, **beside),
        ),
        layout=rows_layout(
            start.name, len(names), each=14 + 15 * lines, barmode="stack", xaxis={"range": [0, max(start.count, 1)]}
        )
        | {"margin": MARGIN | {"r": 8 * max(map(len, text)) + 6}},
        table=data,
    )
