"""Sections on the search: how rules reduced the space, its progress, and predicted against measured figures."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from flagcore.domain.plan import failed_repeats
from flagcore.domain.spec import is_rate, objective_value
from flagcore.domain.trial import ESTIMATE, Role, Trial, TrialState
from flagcore.i18n import _, ngettext
from flagcore.report.page.blocks import (
    Cell,
    Chart,
    Collapsed,
    Section,
    Text,
    cell,
    layout,
    line,
    percent,
    points,
    table,
)
from flagcore.report.page.run import RunData, believed, measured_s, predicted
from flagcore.report.text import funnel_stages, repeats_text


def progress(run: RunData) -> Section | None:
    """Return the section on the best value so far over time, or None if there are no trials."""
    if run.fidelity == ESTIMATE or not run.trials:
        return None
    first, listed = {trial.number for trial in run.trials}, run.listed
    rows, spent, best = list[list[Any]](), 0.0, None
    measured: dict[str, list[tuple[float, float, str]]] = {_("trial"): [], _("repeat"): [], _("stopped early"): []}
    steps = list[tuple[float, float]]()
    for trial in run.all_trials:
        spent += trial.duration_s
        figure, name = run.figure(trial), run.name(trial)
        if trial.number in first:
            if figure is not None and trial.state is TrialState.MEASURED and not _broken(trial):
                best = figure if best is None else (max if is_rate(run.objective) else min)(best, figure)
            steps += [] if best is None else [(spent, best)]
        if figure is not None:
            kind = _("repeat") if trial.role is Role.REPEAT else _("trial")
            kind = _("stopped early") if trial.state is TrialState.STOPPED else kind
            measured[kind].append((spent, figure, name))
        if trial.number in listed:
            row = [run.cell(trial), run.configuration(trial), run.state_text(trial), cell(spent), cell(figure)]
            rows.append([*row, cell(best)])
    data = table(
        _("Trials in the order of their start, with the best {unit} so far", unit=run.unit),
        [_("trial"), _("configuration"), _("state"), _("elapsed, s"), run.unit, _("best so far")],
        rows,
    )
    if not steps:
        return Section("progress", _("Search"), (Text(_("No trial was measured.")), data))
    traces = [line(_("best so far (first runs)"), 0, *zip(*steps, strict=True))]
    traces[0]["line"] |= {"shape": "hv"}
    for series, (kind, of_kind) in enumerate(measured.items(), start=1):
        if of_kind:
            x, y, numbers = zip(*of_kind, strict=True)
            traces.append(points(kind, series, x, y, text=list(numbers)))
    summary = [
        _("{count:,} trials (with repeats) took {seconds:,.0f} s.", count=len(run.all_trials), seconds=spent),
        _improvement(run, steps[0][1], steps[-1][1]),
    ]
    if measured[_("repeat")]:
        summary.append(_("The best configuration is chosen by the median of all runs of a candidate."))
    chart = Chart(
        title=_("Best so far over time"),
        summary=" ".join(summary),
        traces=traces,
        layout=layout(_("total time of trials, s"), run.unit),
        table=data,
    )
    return Section("progress", _("Search"), (chart,))


def _broken(trial: Trial) -> Sequence[str]:
    return trial.measurement.broken if trial.measurement else ()


def _improvement(run: RunData, first: float, last: float) -> str:
    start, end = cell(first).text, cell(last).text
    if start == end:
        return _("The first measured trial was the fastest: {value} {unit}.", value=start, unit=run.unit)
    return _("The best value improved from {start} to {end} {unit}.", start=start, end=end, unit=run.unit)


def funnel(run: RunData) -> Section:
    """Return the section with the counts from all combinations to the untried candidates, and the text of each rule."""
    counts, messages = run.counts, run.insight.get("messages", {})
    rows = [
        [name, cell(number if rule is None else -number), messages.get(rule, "")]
        for rule, name, number in funnel_stages(counts, run.fidelity)
    ]
    caption = _("{title}; a negative number is the number of removed candidates", title=_("Search space"))
    stages = table(caption, [_("stage"), _("number"), _("why")], rows)
    counted = _("{combinations:,} combinations, {candidates:,} candidates, {untried:,} untried", **asdict(counts))
    notes = (Text(line) for line in repeats_text(failed_repeats(run.repeats)))
    return Section("funnel", _("Search space"), (Collapsed("rules", counted, (stages,)), *notes))


def accuracy(run: RunData) -> Section | None:
    """Return the section on the errors of predictions, or None if no trial is both predicted and measured."""
    key, in_unit = "objective" if run.serves else "step_time_s", partial(objective_value, run.objective)
    pairs = []
    for trial in run.trials:
        step = measured_s(trial)
        value, low, high = (predicted(trial, f"{key}.{bound}") for bound in ("value", "low", "high"))
        if step is not None and value is not None and low is not None and high is not None:
            pairs.append((trial, in_unit(step) if run.serves else step, (value, low, high)))
    if not pairs:
        return None
    hits = sum(low <= measured <= high for _trial, measured, (_value, low, high) in pairs)
    text = _("{count} of {total} measurements are inside the 80% interval.", count=hits, total=len(pairs))
    blocks, rows, errors, listed = [Text(text)], list[list[Any]](), learning(run), run.listed
    for trial, measured, (value, low, high) in (pair for pair in pairs if pair[0].number in listed):
        verdict = _("inside") if low <= measured <= high else _("outside")
        row = [run.cell(trial), run.configuration(trial), measured, value, low, high, _error(measured, value), verdict]
        if errors:
            step = believed(trial, "step_time_s.value")
            learned = in_unit(step) if step and run.serves else step
            row += [learned, _error(measured, learned)]
        rows.append(row)
    headings = [_("trial"), _("configuration"), _("measured"), _("~predicted"), _("~low"), _("~high"), _("error")]
    headings += [_("80% interval"), *([_("~learned"), _("after learning")] if errors else [])]
    caption = _("Measured and predicted {unit}, with 80% intervals", unit=run.unit if run.serves else _("s/step"))
    blocks += filter(None, [errors])
    return Section("accuracy", _("Predictions"), (*blocks, table(caption, headings, rows, sortable=True)))


def _error(measured: float, expected: float | None) -> Cell:
    return percent(measured / expected - 1.0 if expected else None, signed=True)


def learning(run: RunData) -> Text | None:
    """Return the median error of predictions before and after learning, or None if there was no learning."""
    if (errors := run.prediction_error) is None:
        return None
    text = ngettext(
        "Median prediction error over {count} trial: {before}, after learning {after}.",
        "Median prediction error over {count} trials: {before}, after learning {after}.",
        errors.trials,
        before=_error_text(errors.before),
        after=_error_text(errors.after),
    )
    return Text(text)


def _error_text(share: float) -> str:
    """Return a relative error as a percentage. From 100% on, it is given as a factor."""
    return f"{share:.1%}" if share < 1.0 else _("a factor of {factor}", factor=f"{1.0 + share:.3g}")
