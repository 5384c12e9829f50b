"""Where every combination went, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flagcore.domain.search_state import DOES_NOT_FIT
from flagcore.domain.trial import PROBE
from flagcore.report.page.blocks import Chart, Section, Text, cell, table
from flagcore.report.page.charts import MARGIN, bars, label, rows_layout
from flagcore.report.page.run import RunData
from flagcore.report.page.translation import told
from flagcore.report.text import repeats_text


@dataclass(frozen=True, slots=True)
class _Took:
    """What was taken away, how many of it, and why."""

    name: str
    count: int
    why: str = ""


def funnel(run: RunData) -> Section:
    """Return the books: from all combinations to the candidates, and what became of these."""
    counts, says = run.result["counts"], run.insight.get("says", {})
    same = "means the same to the engine as a candidate that is left"
    took = [*_rules("illegal", counts["illegal"], says), _Took("the same as another", counts["merged"], same)]
    ran = "probed" if run.fidelity == PROBE else "measured"
    became = [
        _Took("predicted not to fit", counts["does_not_fit"], says.get(DOES_NOT_FIT, "")),
        *_rules("pruned", counts["pruned"], says),
        _Took(ran, counts["measured"]),
        _Took("ended early as surely slower", counts["stopped"]),
        _Took("failed", counts["failed"]),
    ]
    every, left, untried = counts["combinations"], counts["candidates"], counts["untried"]
    blocks = (
        _chart("From combinations to candidates", ("combinations", every), took, ("candidates", left)),
        _chart("What became of the candidates", ("candidates", left), became, ("untried", untried)),
    )
    lost = {each["number"]: each["state"] for each in run.result.get("repeats") or () if not each["measured"]}
    told = (Text(line) for line in repeats_text(lost))
    return Section(anchor="funnel", title="Where the combinations went", blocks=(*blocks, *told))


def _rules(kind: str, counts: Mapping[str, int], says: Mapping[str, str]) -> list[_Took]:
    order = sorted(counts.items(), key=lambda pair: -pair[1])
    return [_Took(f"{kind}: {name}", count, says.get(name, "")) for name, count in order]


def _chart(title: str, start: tuple[str, int], took: Sequence[_Took], end: tuple[str, int]) -> Chart:
    rows: list[tuple[str, int, str]] = [
        (*start, ""),
        *((each.name, -each.count, each.why) for each in took),
        (*end, ""),
    ]
    held = table(
        f"{title}; what is taken away has a minus",
        ["what", "number", "why"],
        [[name, cell(count), why] for name, count, why in rows],
    )
    shown = [each for each in took if each.count]
    names = [start[0], *(each.name for each in shown), end[0]]
    after = [start[1]]
    for each in shown:
        after.append(after[-1] - each.count)
    taken = [0, *(each.count for each in shown), 0]
    text = [f"{start[1]:,}", *(f"-{each.count:,}" for each in shown), f"{end[1]:,}"]
    beside = {"text": text, "textposition": "outside", "cliponaxis": False}
    left = [*after, end[1]]
    lines, most = max(label(told(name)).count("<br>") + 1 for name in names), max(start[1], 1)
    largest = max(shown, key=lambda each: each.count, default=None)
    rest = f' The largest group of the others, {largest.count:,}, is "{largest.name}".' if largest else ""
    return Chart(
        title=title,
        says=f"Of {start[1]:,} {start[0]} {end[1]:,} are {'left' if end[0] == 'candidates' else 'untried'}.{rest}",
        traces=(bars("left", 0, left, names), bars("taken away", 1, taken, names, **beside)),
        layout=rows_layout(start[0], len(names), each=14 + 15 * lines, barmode="stack", xaxis={"range": [0, most]})
        | {"margin": MARGIN | {"r": 8 * max(map(len, text)) + 6}},
        table=held,
    )
