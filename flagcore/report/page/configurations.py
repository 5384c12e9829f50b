"""The fastest configurations side by side, and why the best won."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from flagcore.domain.trial import ESTIMATE
from flagcore.i18n import _, ngettext
from flagcore.report.candidate_report import causes_text, figure_pairs
from flagcore.report.formats import NAMES, shown
from flagcore.report.page.blocks import COLOURS, Chart, bars, cell, label, percent, rows_layout, table
from flagcore.report.page.run import RunData, configuration, name_of, trial_cell
from flagcore.report.result import TrialResult

MAX_BARS = 10
"""Maximum number of configurations, with the best and the baseline."""

Figures = tuple[float, float, float]
"""The objective of a configuration: its median or prediction, its lowest and its highest value."""


def figures_of(run: RunData, trial: TrialResult) -> Figures | None:
    """Return the median of a configuration's runs with their range, or its prediction with its 80% interval."""
    if run.fidelity == ESTIMATE:
        bounds = [run.predicted(trial, bound) for bound in ("value", "low", "high")]
        return None if None in bounds else (bounds[0] or 0.0, bounds[1] or 0.0, bounds[2] or 0.0)
    values = [value for each in final_runs(run, trial) if (value := run.figure(each)) is not None]
    if not values:
        return None
    middle = (
        1.0 / median(1.0 / each for each in values) if run.is_rate else median(values)
    )  # of times, as in the search
    return middle, min(values), max(values)


def final_runs(run: RunData, trial: TrialResult) -> list[TrialResult]:
    """Return the measured runs of a trial's configuration; scaled ones only if there are no others."""
    measured = [each for each in run.runs(trial) if each.state == "measured" and each.measured]
    return [each for each in measured if each.measured and each.measured.step_time_s.scaled_from is None] or measured


def configurations(run: RunData) -> Chart | None:
    """Return a bar for each of the fastest configurations, the best first; None for fewer than two."""
    best, baseline = run.best, run.baseline
    if best is None:
        return None
    known = {int(each.number): (each, figures) for each in run.trials if (figures := figures_of(run, each))}
    own = {int(each.number): each for each in (best, baseline) if each}
    sign = -1.0 if run.is_rate else 1.0
    others = sorted(
        (each for each in known.values() if each[0].candidate not in [trial.candidate for trial in own.values()]),
        key=lambda pair: sign * pair[1][0],
    )
    chosen = [(trial, figures) for trial in own.values() if (figures := figures_of(run, trial))]
    chosen += others[: MAX_BARS - len(chosen)]
    chosen.sort(key=lambda pair: (pair[0].number != best.number, sign * pair[1][0]))
    if len(chosen) < 2:
        return None
    labels = [f"{name_of(run, trial)}: {configuration(run, trial)}" for trial, _figures in chosen]
    rows = [list(_row(run, trial, figures, chosen[0][1])) for trial, figures in chosen]
    summary = _("{count} of {total} configurations, the best first.", count=len(chosen), total=len(run.trials))
    if len(known) < len(run.trials):
        missing = len(run.trials) - len(known)
        summary += " " + ngettext("{count} has no measurement.", "{count} have no measurement.", missing)
    return Chart(
        title=_("The fastest configurations"),
        summary=summary + " " + _bounds_text(run),
        traces=tuple(_traces(run, chosen, labels)),
        layout=rows_layout(
            run.unit,
            len(chosen),
            each=16 + 14 * max(label(each).count("<br>") + 1 for each in labels),
            barmode="overlay",
            xaxis={"rangemode": "tozero"},
            yaxis={"categoryorder": "array", "categoryarray": labels},
        ),
        table=table(
            _("The fastest configurations"),
            [_("trial"), _("configuration"), run.unit, _("lowest"), _("highest"), _("vs best")],
            rows,
        ),
    )


def _bounds_text(run: RunData) -> str:
    if run.fidelity == ESTIMATE:
        return _("Lines are 80% intervals of the predictions.")
    return _("Lines are the range of the runs of a configuration.") if run.result.repeats else ""


def _row(run: RunData, trial: TrialResult, figures: Figures, best: Figures) -> Iterator[Any]:
    yield trial_cell(run, trial)
    yield configuration(run, trial)
    yield from map(cell, figures)
    yield percent(figures[0] / best[0] - 1.0, signed=True)


def _traces(run: RunData, chosen: list[tuple[TrialResult, Figures]], labels: list[str]) -> Iterator[dict[str, Any]]:
    names = {"best": _("best"), "baseline": _("baseline"), "other": _("others")}
    numbers = {each.number: kind for kind, each in (("baseline", run.baseline), ("best", run.best)) if each}
    kinds = [numbers.get(trial.number, "other") for trial, _figures in chosen]
    for series, colour, kind in ((0, 0, "best"), (1, 1, "baseline"), (2, 6, "other")):
        places = [place for place, each in enumerate(kinds) if each == kind]
        if not places:
            continue
        values = [chosen[place][1] for place in places]
        errors = {
            "type": "data",
            "symmetric": False,
            "array": [high - value for value, _low, high in values],
            "arrayminus": [value - low for value, low, _high in values],
            "thickness": 1.5,
            "width": 4,
            "color": "#888888",
        }
        ranges = {"error_x": errors} if any(low < high for _value, low, high in values) else {}
        texts = {"text": [shown(value) for value, _low, _high in values], "textposition": "inside"}
        style = {"insidetextanchor": "start", "textangle": 0, "textfont": {"color": "#000000"}, "width": 0.7}
        trace = bars(names[kind], series, [each[0] for each in values], [labels[place] for place in places])
        pattern = {**trace["marker"]["pattern"], "size": 10, "solidity": 0.1}  # numbers stay readable
        marker = {**trace["marker"], "color": COLOURS[colour], "pattern": pattern}
        yield {**trace, **texts, **style, **ranges, "marker": marker}


def why(run: RunData) -> str:
    """Return why the best is faster than the baseline, or than the second if it is the baseline; empty if unknown."""
    best, other, name = run.best, run.baseline, _("the baseline")
    if best is None or not run.trials:
        return ""
    if other is None or other.candidate == best.candidate:
        second = _second(run, best)
        if second is None:
            return ""
        other, name = second, _("the second, trial {number}", number=second.number)
    seconds = [median_s(run, each) for each in (other, best)]
    if None in seconds:
        return ""
    predicted = [each.predicted.step_s for each in (other, best)]
    parts = figure_pairs(other.predicted.time, best.predicted.time)
    return causes_text(
        run.objective,
        name,
        (seconds[0] or 0.0, seconds[1] or 0.0),
        (predicted[0], predicted[1]),
        parts,
        _(NAMES["trials_made"][run.fidelity]),
        has_rounds=other is run.baseline and run.result.speedup is not None,
    )


def _second(run: RunData, best: TrialResult) -> TrialResult | None:
    """Return the fastest other trial with a time."""
    others = [each for each in run.trials if each.candidate != best.candidate and median_s(run, each)]
    return min(others, key=lambda each: median_s(run, each) or 0.0, default=None)


def median_s(run: RunData, trial: TrialResult) -> float | None:
    """Return the median step time of the runs of a trial's configuration, or its predicted step time."""
    if run.fidelity == ESTIMATE:
        return trial.seconds
    return median(values) if (values := [s for each in final_runs(run, trial) if (s := each.seconds)]) else None
