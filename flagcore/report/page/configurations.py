"""The fastest configurations side by side, and why the best won."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flagcore.domain.trial import ESTIMATE, Trial
from flagcore.i18n import _, ngettext
from flagcore.report.candidate_report import causes_text, figure_pairs
from flagcore.report.formats import NAMES, shown
from flagcore.report.page.blocks import COLOURS, Chart, bars, error_bars, label, percent, rows_layout, table
from flagcore.report.page.run import Figures, RunData, predicted_s, time_parts

MAX_BARS = 10
"""Maximum number of configurations, with the best and the baseline."""


def configurations(run: RunData) -> Chart | None:
    """Return a bar for each of the fastest configurations, the best first; None for fewer than two."""
    best = run.best
    if best is None:
        return None
    own = {each.number: each for each in (best, run.baseline) if each}
    candidates = [trial.candidate for trial in own.values()]
    known = {each.number: (each, figures) for each in run.trials if (figures := run.figures(each))}
    sign = -1.0 if run.is_rate else 1.0
    others = [each for each in known.values() if each[0].candidate not in candidates]
    others.sort(key=lambda pair: sign * pair[1][0])
    chosen = [(trial, figures) for trial in own.values() if (figures := run.figures(trial))]
    chosen += others[: MAX_BARS - len(chosen)]
    chosen.sort(key=lambda pair: (pair[0].number != best.number, sign * pair[1][0]))
    if len(chosen) < 2:
        return None
    labels = [f"{run.name(trial)}: {run.configuration(trial)}" for trial, _figures in chosen]
    first = chosen[0][1][0]
    rows = [
        [run.cell(trial), run.configuration(trial), *figures, percent(figures[0] / first - 1.0, signed=True)]
        for trial, figures in chosen
    ]
    summary = [_("{count} of {total} configurations, the best first.", count=len(chosen), total=len(run.trials))]
    if missing := len(run.trials) - len(known):
        summary.append(ngettext("{count} has no measurement.", "{count} have no measurement.", missing))
    if run.fidelity == ESTIMATE:
        summary.append(_("Lines are 80% intervals of the predictions."))
    else:
        summary.append(_("Lines are the range of the runs of a configuration.") if run.repeats else "")
    title = _("The fastest configurations")
    headings = [_("trial"), _("configuration"), run.unit, _("lowest"), _("highest"), _("vs best")]
    return Chart(
        title=title,
        summary=" ".join(summary),
        traces=list(_traces(run, chosen, labels)),
        layout=rows_layout(
            run.unit,
            len(chosen),
            each=16 + 14 * max(label(each).count("<br>") + 1 for each in labels),
            barmode="overlay",
            xaxis={"rangemode": "tozero"},
            yaxis={"categoryorder": "array", "categoryarray": labels},
        ),
        table=table(title, headings, rows),
    )


def _traces(run: RunData, chosen: list[tuple[Trial, Figures]], labels: list[str]) -> Iterator[dict[str, Any]]:
    kinds = {each.number: kind for kind, each in ((1, run.baseline), (0, run.best)) if each}
    for kind, (name, colour) in enumerate(((_("best"), 0), (_("baseline"), 1), (_("others"), 6))):
        own = [place for place, (trial, _figures) in enumerate(chosen) if kinds.get(trial.number, 2) == kind]
        figures = [chosen[place][1] for place in own]
        if not own:
            continue
        has_range = any(low < high for _value, low, high in figures)
        ranges = {"error_x": error_bars(figures, thickness=1.5, color="#888888")} if has_range else {}
        texts = {"text": [shown(value) for value, _low, _high in figures], "textposition": "inside"}
        style = {"insidetextanchor": "start", "textangle": 0, "textfont": {"color": "#000000"}, "width": 0.7}
        trace = bars(name, kind, [each[0] for each in figures], [labels[place] for place in own])
        pattern = {**trace["marker"]["pattern"], "size": 10, "solidity": 0.1}  # numbers stay readable
        marker = {**trace["marker"], "color": COLOURS[colour], "pattern": pattern}
        yield {**trace, **texts, **style, **ranges, "marker": marker}


def why(run: RunData) -> str:
    """Return why the best is faster than the baseline, or than the second if it is the baseline; empty if unknown."""
    best, other, name = run.best, run.baseline, _("the baseline")
    if best is None or not run.trials:
        return ""
    if other is None or other.candidate == best.candidate:
        others = [each for each in run.trials if each.candidate != best.candidate and run.median_s(each)]
        if not others:
            return ""
        other = min(others, key=lambda each: run.median_s(each) or 0.0)
        name = _("the second, trial {number}", number=other.number)
    times = (run.median_s(other), run.median_s(best))
    if times[0] is None or times[1] is None:
        return ""
    return causes_text(
        run.objective,
        name,
        (times[0], times[1]),
        (predicted_s(other), predicted_s(best)),
        figure_pairs(time_parts(other), time_parts(best)),
        _(NAMES["trials_made"][run.fidelity]),
        has_rounds=other is run.baseline and run.speedup is not None,
    )
