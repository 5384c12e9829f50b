"""Assembles the sections of the page of a run, including those on the search, the environment and the chips."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import starmap
from pathlib import Path
from typing import Any

from flagcore.domain.metrics import load_text
from flagcore.domain.plan import failed_repeats
from flagcore.domain.spec import is_rate, objective_value
from flagcore.domain.trial import ESTIMATE, Role, Trial, TrialState
from flagcore.i18n import N_, _, ngettext
from flagcore.report.blocks import Cell, Facts, Text, cell, percent, table
from flagcore.report.explanation import causes_text
from flagcore.report.formats import NAMES, shown, size_text
from flagcore.report.run import RunData, measured_s
from flagcore.report.run_text import learning, trial_table
from flagcore.report.summary import answer, details, ending
from flagcore.report.text import duration_text, funnel_stages, limits_text, reason_text, repeats_text
from flagcore.spec.plain_data import lookup
from flagcore_page.blocks import (
    BEST,
    Bar,
    Bars,
    Block,
    Chart,
    Code,
    Collapsed,
    Page,
    Plot,
    Section,
    Series,
    linear,
    render,
    spread,
)
from flagcore_page.resources import improvements, measured_points, memory, pipeline, serving, step_time
from flagcore_page.start import commands, configurations, log_ends, text_of

MOST_LISTED = 30
"""The maximum number of trials in tables, so that a page of 500 trials stays small."""


def page(run: RunData) -> Page:
    """Return the page of a run. Empty sections are left out."""
    run = replace(run, most_listed=MOST_LISTED)
    pictures = (step_time, memory, accuracy, progress, funnel, improvements)
    sections = (summary, serving, *pictures, trials, pipeline, environment, chips)
    model, name = lookup(run.spec, "model"), run.folder.resolve().name
    model = str(model.get("name") or "") if isinstance(model, Mapping) else Path(str(model or "")).name
    title = N_("Serving {model} on {hardware}") if run.serves else N_("Training {model} on {hardware}")
    return Page(
        title=_(title, hardware=run.hardware, model=model or name),
        subtitle=" · ".join(filter(None, [name if model and not run.start else "", *_job(run)])),
        sections=tuple(section for make in sections if (section := make(run)) is not None),
    )


def as_html(run: RunData) -> str:
    """Return the page of a run as HTML; see `flagcore.contracts.PageWriter`."""
    return render(page(run))


def _job(run: RunData) -> Iterator[str]:
    """Yield the work, the objective, the number of candidates, the time that they took, and the date."""
    train, load = (lookup(run.spec, key) or {} for key in ("train", "serve.profile"))
    if samples := train.get("global_batch_size"):
        yield _(
            "sequences of {length} tokens, global batch size {samples}", length=train["seq_length"], samples=samples
        )
    if load.get("input_len"):
        yield _(
            "prompts of {input} tokens, answers of {output}", input=load["input_len"], output=load.get("output_len")
        )
    points = [point for trial in (run.best, run.baseline) if trial for point in measured_points(trial)]
    yield ", ".join(dict.fromkeys(map(load_text, points)))
    yield limits_text(run.limits)
    how = _("not measured") if run.is_unmeasured else _(NAMES["trials_made"][run.fidelity])
    made = run.counts.candidates if run.fidelity == ESTIMATE else len(run.trials)  # a plan lists its first ones
    yield ngettext("{count:,} candidate, {how}", "{count:,} candidates, {how}", made, how=how)
    yield _("objective: {objective}", objective=run.unit)
    spent_s = sum(each.duration_s for each in run.all_trials)
    yield duration_text(spent_s) if spent_s else ""
    yield run.date


def summary(run: RunData) -> Section:
    """Return the summary section: the winner, how to start it, and what to do next."""
    blocks: list[Block] = [*answer(run), *(commands(run, run.best) if run.best else ()), *ending(run)]
    return Section("summary", _("Summary"), [*blocks, *filter(None, [configurations(run)]), *details(run)])


UNITS = {"bytes": (2**30, "GiB"), "bytes/s": (1e9, "GB/s"), "flops/s": (1e12, "TFLOP/s")}


def environment(run: RunData) -> Section:
    """Return the section with versions, environment variables and the spec."""
    trial = next((each for each in [run.best, *run.all_trials] if each and each.measurement), None)
    measured = trial.measurement if trial else None
    facts = [(_("Hardware"), Cell(run.hardware)), (_("flagcore of this page"), Cell(version("flagcore")))]
    facts += [(str(name), Cell(str(version))) for name, version in (measured.versions if measured else {}).items()]
    blocks: list[Block] = [Facts([each for each in facts if each[1].text])]
    telemetry, effective = (measured.telemetry, measured.effective) if measured else ({}, {})
    number = trial.number if trial else 0
    for caption, heading, found in (
        (_("Environment variables set by plugins"), _("variable"), run.insight.get("environment") or {}),
        (_("Telemetry of trial {number}", number=number), _("metric"), dict(starmap(_metric, telemetry.items()))),
        (_("Effective values reported by the engine, trial {number}", number=number), _("name"), effective),
    ):
        rows = [[str(name), value if isinstance(value, Cell) else str(value)] for name, value in found.items()]
        blocks += [table(caption, [heading, _("value")], rows)] if rows else []
    if spec := text_of(run, run.folder / "spec.yaml"):
        title = _("Spec (spec.yaml)")
        blocks.append(Collapsed("spec", title, (Code(title, spec.rstrip()),)))
    folded = Collapsed("versions", _("Versions, variables and telemetry"), blocks)
    return Section("environment", _("Environment"), [folded])


METRICS = {"bytes per second": (1e6, "MB/s"), "bytes": (2**30, "GiB"), "hertz": (1e9, "GHz"), "share": (0.01, "%")}
METRICS |= {"watts": (1.0, "W"), "celsius": (1.0, "°C"), "disk wait": (0.01, "%")}
"""The sizes and names of units, by the last words of a metric of telemetry."""


def _metric(name: str, value: float) -> tuple[str, Cell]:
    """Return the name and the value of a metric of telemetry in units for people."""
    words = name.replace("_", " ")
    size, unit = next((unit for end, unit in METRICS.items() if words.endswith(end)), (1.0, ""))
    words = words.removesuffix(" bytes per second").removesuffix(" bytes")
    return words, Cell(f"{shown(value / size)} {unit}".strip(), value)


def chips(run: RunData) -> Section:
    """Return the section with the facts of the chips on which predictions are based, each with its source."""
    blocks: list[Block] = []
    if run.insight.get("kernels_guessed"):
        text = _(
            "The kernels of this chip were not measured: times are predicted from its peak rates, with wider intervals."
        )
        blocks.append(Text(text, warning=True))
    for chip in run.insight.get("chips") or []:
        rows = [_fact(fact) for fact in chip["facts"]]
        if budget := chip.get("memory_budget_bytes"):
            limit = Cell(size_text(budget), float(budget))
            rows.append([_("memory limit per device"), limit, _("from the spec or the driver"), ""])
        devices = f"{chip['nodes']} x {chip['devices_per_node']} {chip['name']} ({chip['vendor']})"
        blocks.append(table(devices, [_("fact"), _("value"), _("kind of source"), _("source")], rows))
        if chip.get("notes"):
            blocks.append(Text(_(str(chip["notes"]))))
    if not blocks:
        return Section("chips", _("Chips"), (Text(_("This run has no facts about the chip.")),))
    return Section("chips", _("Chips"), [Collapsed("facts", _("Figures on which predictions are based"), blocks)])


PEAK = NAMES["facts"]["peak"]


def _fact(fact: Mapping[str, Any]) -> list[Any]:
    unit, name = UNITS[fact["unit"]]
    value, fact_name, kind = float(fact["value"]), _(fact["fact"]), fact["kind"]
    if fact["fact"].startswith(PEAK):
        fact_name = _(PEAK) + fact["fact"].removeprefix(PEAK)
    return [fact_name, Cell(f"{shown(value / unit)} {name}", value), _(kind), fact["from"]]


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
    text = N_("Details of each candidate") if run.fidelity == ESTIMATE else N_("Details and logs of each trial")
    blocks.append(Collapsed("logs", _(text), details))
    if len(listed) < count:
        text = N_(
            "Tables list {count} of {total:,} trials: the fastest, and the first that failed. result.json has all."
        )
        blocks.insert(0, Text(_(text, count=len(listed), total=count)))
    return Section("trials", _("Candidates") if run.fidelity == ESTIMATE else _("Trials"), blocks)


def _details(run: RunData, trial: Trial, logs: Sequence[tuple[str, str]]) -> Collapsed:
    has_run = trial.state is not TrialState.PREDICTED
    limit, believed = trial.time_limit, trial.believed
    facts = [
        (_("State"), Cell(run.state_text(trial))),
        (_("Reason"), cell(reason_text(trial.reason) or None)),
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
    title = f"{_(NAMES['row'][run.fidelity]).capitalize()} {run.name(trial)}: {run.state_text(trial)}"
    title += f", {run.configuration(trial)}"
    return Collapsed(f"trial-{trial.number}", title, blocks)


def _comparison(run: RunData, trial: Trial) -> Iterator[Text]:
    """Yield why a trial's configuration is slower or faster than the best, if both times are known."""
    if run.best is None or trial.candidate == run.best.candidate or trial.fidelity != run.fidelity:
        return
    times = run.median_s(run.best), run.median_s(trial)
    if times[0] is not None and times[1] is not None:
        predictions, source = (run.best.predicted, trial.predicted), _(NAMES["trials_made"][run.fidelity])
        name = _("the recommended candidate") if run.fidelity == ESTIMATE else _("the best")
        yield Text(causes_text(run.objective, name, (times[0], times[1]), predictions, source))


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
    rows, spent, last, sign = list[list[Any]](), 0.0, 0.0, 1.0 if is_rate(run.objective) else -1.0
    measured: dict[str, list[tuple[float, float, str]]] = {_("trial"): [], _("repeat"): [], _("stopped early"): []}
    steps = list[tuple[float, float, str]]()
    for trial in run.all_trials:
        spent += trial.duration_s
        last = spent if trial.number in first else last
        if (figure := run.figure(trial)) is None or trial.measurement is None:
            continue
        counts = trial.number in first and trial.state is TrialState.MEASURED and not trial.measurement.broken
        if counts and (not steps or sign * figure > sign * steps[-1][1]):
            steps.append((spent, figure, ""))
            rows.append([run.cell(trial), run.configuration(trial), spent, figure])
        kind = _("repeat") if trial.role is Role.REPEAT else _("trial")
        kind = _("stopped early") if trial.state is TrialState.STOPPED else kind
        measured[kind].append((spent, figure, f"{_('trial')} {run.name(trial)}" if trial.number in listed else ""))
    if not steps:
        return None
    steps.append((last, steps[-1][1], ""))
    series = [Series(name=_("best so far (without repeats)"), points=steps, style=0, stepped=True)]
    series += [
        Series(name=kind, points=points, style=style)
        for style, (kind, points) in enumerate(measured.items(), start=1)
        if points
    ]
    drawn = [point for each in series for point in each.points]
    start, end = (shown(steps[place][1]) for place in (0, -1))
    improved = N_("The best value improved from {start} to {end} {unit}.")
    improved = improved if start != end else N_("The first measured trial was the fastest: {value} {unit}.")
    summary = [
        _("{count:,} trials (with repeats) took {seconds:,.0f} s.", count=len(run.all_trials), seconds=spent),
        _(improved, start=start, end=end, value=end, unit=run.unit),
    ]
    if measured[_("repeat")]:
        summary.append(_("The best configuration is chosen by the median of all runs of a candidate."))
    caption = _("Trials that were the best so far, in the order of their start")
    chart = Chart(
        title=_("Best so far over time"),
        summary=" ".join(summary),
        drawing=Plot(
            x=linear(_("total time of trials, s"), [x for x, _y, _name in drawn], from_zero=True),
            y=linear(run.unit, [y for _x, y, _name in drawn]),
            series=series,
        ),
        tables=[table(caption, [_("trial"), _("configuration"), _("elapsed, s"), run.unit], rows)],
    )
    return Section("progress", _("Search"), (chart,), half=True)


def funnel(run: RunData) -> Section:
    """Return the section with the way from all combinations to the measured candidates, and the text of each rule."""
    counts, messages = run.counts, run.insight.get("messages", {})
    rows = [
        [name, cell(number if rule is None else -number), _(messages.get(rule, ""))]
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

    def in_unit(step_s: float) -> float:
        return objective_value(run.objective, step_s) if run.serves else step_s

    rows, errors, listed, drawn = list[list[Any]](), learning(run), run.listed, list[float]()
    groups: dict[bool, list[tuple[tuple[float, float, str], tuple[float, float]]]] = {True: [], False: []}
    for trial in run.trials:
        step = measured_s(trial)
        found = trial.predicted and (trial.predicted.objective if run.serves else trial.predicted.step)
        if step is None or not found:
            continue
        measured, value, low, high = in_unit(step), found.value, found.low, found.high
        is_inside, is_listed = low <= measured <= high, trial.number in listed
        name = f"{_('trial')} {run.name(trial)}" if is_listed else ""
        groups[is_inside].append(((measured, value, name), (low, high)))
        drawn += (measured, value, low, high)
        believed_s = trial.believed.step_time_s if trial.believed else None
        learned = in_unit(believed_s) if believed_s else None
        verdict = _("inside") if is_inside else _("outside")
        row = [run.cell(trial), run.configuration(trial), measured, value, low, high, _error(measured, value), verdict]
        rows += [[*row, *([learned, _error(measured, learned)] if errors else [])]] if is_listed else []
    if not drawn:
        return None
    total, unit = sum(map(len, groups.values())), run.unit if run.serves else _("s/step")
    text = _("{count} of {total} measurements are inside the 80% interval.", count=len(groups[True]), total=total)
    headings = [_("trial"), _("configuration"), _("measured"), _("~predicted"), _("~low"), _("~high"), _("error")]
    headings += [_("80% interval"), *([_("~learned"), _("after learning")] if errors else [])]
    caption, axis = _("Measured and predicted {unit}, with 80% intervals", unit=unit), spread("", drawn)
    names = {True: (2, _("inside its interval")), False: (1, _("outside its interval"))}
    series = [
        Series(name=name, points=[each for each, _range in group], style=style, ranges=[each for _point, each in group])
        for is_inside, (style, name) in names.items()
        if (group := groups[is_inside])
    ]
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
