"""Sections on the search: trials with the ends of their logs, the best value over time, the rules that reduced the
space, and predicted against measured times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from flagcore.domain.plan import failed_repeats
from flagcore.domain.spec import is_rate, objective_value
from flagcore.domain.trial import ESTIMATE, Role, Trial, TrialState
from flagcore.i18n import N_, _
from flagcore.report.blocks import Cell, Facts, Text, cell, percent, table
from flagcore.report.candidate_report import causes_text
from flagcore.report.formats import NAMES, shown
from flagcore.report.run import RunData, measured_s
from flagcore.report.run_text import learning, trial_table
from flagcore.report.text import duration_text, funnel_stages, repeats_text
from flagcore_page.blocks import Block, Chart, Code, Collapsed, Section
from flagcore_page.charts import BEST, Bar, Bars, Plot, Series, linear, spread
from flagcore_page.run_files import log_ends

MAX_LOGS = 25_000
"""About how many characters of logs a page has: those of the best, the baseline and failed trials come first."""


def trials(run: RunData) -> Section:
    """Return the section with a table of all trials, and the details of each."""
    if not run.all_trials:
        return Section("trials", _("Trials"), (Text(_("No trial has finished.")),))
    listed, count = run.listed, len(run.all_trials)
    logs, left = {}, MAX_LOGS
    by_number = {trial.number: trial for trial in run.all_trials}
    for number in listed:
        logs[number] = log_ends(run, by_number[number]) if left > 0 else []
        left -= sum(len(text) for _name, text in logs[number])
    details = [_details(run, trial, logs[trial.number]) for trial in run.all_trials if trial.number in listed]
    blocks: list[Block] = [trial_table(run, whole=True)]
    blocks.append(Collapsed("logs", _("Details and logs of each trial"), details))
    if len(listed) < count:
        text = N_(
            "Tables list {count} of {total:,} trials: the fastest, and the first that failed. result.json has all."
        )
        blocks.insert(0, Text(_(text, count=len(listed), total=count)))
    return Section("trials", _("Trials"), blocks)


def _details(run: RunData, trial: Trial, logs: Sequence[tuple[str, str]]) -> Collapsed:
    has_run = trial.state is not TrialState.PREDICTED
    limit, believed = trial.time_limit, trial.believed
    facts = [
        (_("State"), Cell(run.state_text(trial))),
        (_("Reason"), cell(trial.reason)),
        (_("Chosen for"), cell(trial.chosen_because)),
        (_("Expected step before the trial, s"), cell(believed.step_time_s if believed else None)),
        (_("Expected probability of fitting in memory"), percent(believed.chance_to_fit if believed else None)),
        (_("Time limit"), cell(f"{duration_text(limit.seconds)}: {limit.because}" if limit else None)),
        (_("Shortened steps"), cell(_shortened_text(trial))),
        (_("Log"), cell(trial.log if has_run else None)),
    ]
    blocks: list[Block] = [*_comparison(run, trial), Facts([pair for pair in facts if pair[1].text != "-"])]
    if has_run:
        tails = [Code(_("End of {file}", file=name), text) for name, text in logs]
        blocks += tails or [Text(_("Its logs are empty, were deleted, or are too long for this page."))]
    title = f"{_('Trial')} {run.name(trial)}: {run.state_text(trial)}, {run.configuration(trial)}"
    return Collapsed(f"trial-{trial.number}", title, blocks)


def _comparison(run: RunData, trial: Trial) -> Iterator[Text]:
    """Yield why a trial's configuration is slower or faster than the best, if both times are known."""
    if run.best is None or trial.candidate == run.best.candidate or trial.fidelity != run.fidelity:
        return
    times = run.median_s(run.best), run.median_s(trial)
    if times[0] is not None and times[1] is not None:
        predictions, source = (run.best.predicted, trial.predicted), _(NAMES["trials_made"][run.fidelity])
        yield Text(causes_text(run.objective, _("the best"), (times[0], times[1]), predictions, source))


def _shortened_text(trial: Trial) -> str | None:
    if not (shortened := trial.shortened):
        return None
    figures = asdict(shortened) | {name: shown(getattr(shortened, name)) for name in ("whole", "scale", "low", "high")}
    text = N_(
        "{part} of {whole} samples; a whole step is predicted to take {scale} times as long (80%: {low} to {high})"
    )
    if shortened.nodes:
        text = N_(
            "{nodes} of {of_nodes} nodes; a step on all nodes is predicted to take {scale} times as long "
            "(80%: {low} to {high})"
        )
    return _(text, part=shortened.global_batch_size, **figures)


def progress(run: RunData) -> Section | None:
    """Return the section on the best value so far over time, or None if no trial was measured."""
    if run.fidelity == ESTIMATE or not run.trials:
        return None
    first, listed = {trial.number for trial in run.trials}, run.listed
    rows, spent, best = list[list[Any]](), 0.0, None
    measured: dict[str, list[tuple[float, float, str]]] = {_("trial"): [], _("repeat"): [], _("stopped early"): []}
    steps = list[tuple[float, float, str]]()
    for trial in run.all_trials:
        spent += trial.duration_s
        figure, name = run.figure(trial), run.name(trial)
        if trial.number in first:
            broken = trial.measurement.broken if trial.measurement else ()
            if figure is not None and trial.state is TrialState.MEASURED and not broken:
                before = best
                best = figure if best is None else (max if is_rate(run.objective) else min)(best, figure)
                if best != before:
                    rows.append([run.cell(trial), run.configuration(trial), cell(spent), cell(figure)])
            if len(steps) > 1 and steps[-2][1] == steps[-1][1] == best:
                steps.pop()  # a line needs its ends only
            steps += [] if best is None else [(spent, best, name)]
        if figure is not None:
            kind = _("repeat") if trial.role is Role.REPEAT else _("trial")
            kind = _("stopped early") if trial.state is TrialState.STOPPED else kind
            measured[kind].append((spent, figure, f"{_('trial')} {name}" if trial.number in listed else ""))
    data = table(
        _("Trials that were the best so far, in the order of their start"),
        [_("trial"), _("configuration"), _("elapsed, s"), run.unit],
        rows,
    )
    if not steps:
        return None
    series = [Series(name=_("best so far (without repeats)"), points=steps, style=0, stepped=True)]
    series += [
        Series(name=kind, points=points, style=style)
        for style, (kind, points) in enumerate(measured.items(), start=1)
        if points
    ]
    drawn = [point for each in series for point in each.points]
    summary = [
        _("{count:,} trials (with repeats) took {seconds:,.0f} s.", count=len(run.all_trials), seconds=spent),
        _improvement(run, steps[0][1], steps[-1][1]),
    ]
    if measured[_("repeat")]:
        summary.append(_("The best configuration is chosen by the median of all runs of a candidate."))
    chart = Chart(
        title=_("Best so far over time"),
        summary=" ".join(summary),
        drawing=Plot(
            x=linear(_("total time of trials, s"), [x for x, _y, _name in drawn], from_zero=True),
            y=linear(run.unit, [y for _x, y, _name in drawn]),
            series=series,
        ),
        tables=[data],
    )
    return Section("progress", _("Search"), (chart,), half=True)


def _improvement(run: RunData, first: float, last: float) -> str:
    start, end = cell(first).text, cell(last).text
    if start == end:
        return _("The first measured trial was the fastest: {value} {unit}.", value=start, unit=run.unit)
    return _("The best value improved from {start} to {end} {unit}.", start=start, end=end, unit=run.unit)


def funnel(run: RunData) -> Section:
    """Return the section with the way from all combinations to the measured candidates, and the text of each rule."""
    counts, messages = run.counts, run.insight.get("messages", {})
    rows = [
        [name, cell(number if rule is None else -number), messages.get(rule, "")]
        for rule, name, number in funnel_stages(counts, run.fidelity)
    ]
    caption = _("{title}; a negative number is the number of removed candidates", title=_("Search space"))
    fitting = counts.candidates - counts.does_not_fit
    stages = {
        _("combinations"): counts.combinations,
        _("legal and different"): counts.candidates,
        _("predicted to fit in memory"): fitting,
        _("not removed by a rule"): fitting - sum(counts.pruned.values()),
        **({_("measured"): counts.measured} if counts.measured else {}),
    }
    bars = [Bar(name, BEST, number, number, number, f"{number:,}") for name, number in stages.items()]
    summary = _("{combinations:,} combinations, {candidates:,} candidates, {untried:,} untried", **asdict(counts))
    chart = Chart(
        title=_("Combinations that are left after each stage"),
        summary=f"{summary}. " + _("Lengths are logarithmic."),
        drawing=Bars(_("candidates"), bars, is_log=True),
        tables=[table(caption, [_("stage"), _("number"), _("why")], rows)],
    )
    notes = (Text(line) for line in repeats_text(failed_repeats(run.repeats)))
    return Section("funnel", _("Search space"), (chart, *notes), half=True)


def accuracy(run: RunData) -> Section | None:
    """Return the section on the errors of predictions, or None if no trial is both predicted and measured."""
    in_unit = partial(objective_value, run.objective)
    pairs = []
    for trial in run.trials:
        step = measured_s(trial)
        found = trial.predicted and (trial.predicted.objective if run.serves else trial.predicted.step)
        if step is not None and found:
            pairs.append((trial, in_unit(step) if run.serves else step, (found.value, found.low, found.high)))
    if not pairs:
        return None
    hits = sum(low <= measured <= high for _trial, measured, (_value, low, high) in pairs)
    text = _("{count} of {total} measurements are inside the 80% interval.", count=hits, total=len(pairs))
    rows, errors, listed = list[list[Any]](), learning(run), run.listed
    for trial, measured, (value, low, high) in (pair for pair in pairs if pair[0].number in listed):
        verdict = _("inside") if low <= measured <= high else _("outside")
        row = [run.cell(trial), run.configuration(trial), measured, value, low, high, _error(measured, value), verdict]
        if errors:
            step = trial.believed.step_time_s if trial.believed else None
            learned = in_unit(step) if step and run.serves else step
            row += [learned, _error(measured, learned)]
        rows.append(row)
    headings = [_("trial"), _("configuration"), _("measured"), _("~predicted"), _("~low"), _("~high"), _("error")]
    headings += [_("80% interval"), *([_("~learned"), _("after learning")] if errors else [])]
    caption = _("Measured and predicted {unit}, with 80% intervals", unit=run.unit if run.serves else _("s/step"))
    unit = run.unit if run.serves else _("s/step")
    axis = spread("", [each for _trial, measured, bounds in pairs for each in (measured, *bounds)])
    series = []
    for style, name, is_inside in ((2, _("inside its interval"), True), (1, _("outside its interval"), False)):
        group = [pair for pair in pairs if (pair[2][1] <= pair[1] <= pair[2][2]) == is_inside]
        points = [
            (measured, value, f"{_('trial')} {run.name(trial)}" if trial.number in listed else "")
            for trial, measured, (value, *_bounds) in group
        ]
        ranges = [(low, high) for _trial, _measured, (_value, low, high) in group]
        series += [Series(name=name, points=points, style=style, ranges=ranges)] if points else []
    chart = Chart(
        title=_("Predicted against measured"),
        summary=" ".join([text, *([errors.text] if errors else [])]),
        drawing=Plot(
            x=replace(axis, title=_("measured {unit}", unit=unit)),
            y=replace(axis, title=_("predicted {unit}", unit=unit)),
            series=series,
            diagonal=_("predicted = measured"),
        ),
        tables=[table(caption, headings, rows, sortable=True)],
    )
    return Section("accuracy", _("Predictions"), (chart,), half=True)


def _error(measured: float, expected: float | None) -> Cell:
    return percent(measured / expected - 1.0 if expected else None, signed=True)
