"""Sections with a sortable table of all trials, and the ends of their logs."""

from dataclasses import asdict

from flagcore.domain.trial import Trial, TrialState
from flagcore.i18n import N_, _
from flagcore.report.formats import shown
from flagcore.report.page.blocks import (
    Block,
    Cell,
    Code,
    Collapsed,
    Facts,
    Section,
    Table,
    Text,
    cell,
    highlighted,
    percent,
    table,
)
from flagcore.report.page.run import RunData, believed, predicted, predicted_s, seconds, served
from flagcore.report.text import duration_text, gain_text

LATENCIES = {"TTFT p50 s": "ttft_s.p50", "TTFT p99 s": "ttft_s.p99", "TPOT p50 s": "tpot_s.p50"}
GIB = 2**30


def trials(run: RunData) -> Section:
    """Return the section with a table of all trials, and the details of each."""
    if not run.all_trials:
        return Section("trials", _("Trials"), (Text(_("No trial has finished.")),))
    listed, count = run.listed, len(run.all_trials)
    details = [_details(run, trial) for trial in run.all_trials if trial.number in listed]
    blocks: list[Block] = [trial_table(run, whole=True)]
    blocks.append(Collapsed("logs", _("Details and logs of each trial"), details))
    if len(listed) < count:
        text = _(
            "Tables list {count} of {total:,} trials: the fastest, and the first that failed. result.json has all.",
            count=len(listed),
            total=count,
        )
        blocks.insert(0, Text(text))
    return Section("trials", _("Trials"), blocks)


def trial_table(run: RunData, *, whole: bool = False) -> Table:
    """Return a table with one row per trial. If it is `whole`, it has durations and reasons, and no empty columns."""
    if run.serves:
        figures = [run.unit, _("spread"), f"~{run.unit}", _("vs base"), *LATENCIES]
    else:
        figures = [_("step s"), _("spread"), _("~step s"), "tok/s/dev", _("vs base"), "GiB", "~GiB"]
    headings = [_("trial"), _("configuration"), _("state"), *figures, *([_("duration s"), _("reason")] * whole)]
    rows, listed = [], run.listed
    for trial in (each for each in run.all_trials if each.number in listed):
        row = [run.cell(trial), Cell(run.configuration(trial)), Cell(run.state_text(trial))]
        row += _serving_row(run, trial) if run.serves else _training_row(run, trial)
        rows.append(row + [cell(trial.duration_s or None), cell(trial.reason)] * whole)
    used = [place for place in range(len(headings)) if not whole or any(row[place].text != "-" for row in rows)]
    return table(
        _("All trials, probes and repeats; ~ is predicted"),
        [headings[place] for place in used],
        [[row[place] for place in used] for row in rows],
        sortable=True,
    )


def _training_row(run: RunData, trial: Trial) -> list[Cell]:
    measured, is_predicted = trial.measurement, trial.state is TrialState.PREDICTED
    mark = "~" if is_predicted or (measured and measured.modelled_s is not None) else ""
    speed = predicted(trial, "tokens_per_second_per_device.value") if is_predicted else run.figure(trial)
    used = (measured.device_used_bytes or measured.peak_reserved_bytes) if measured else None
    return [
        highlighted(measured.step_time_s if measured else None, mark),
        cell(measured.spread_s if measured else None),
        highlighted(predicted_s(trial)),
        highlighted(speed, mark),
        percent(_gain(run, trial), mark, signed=True),
        cell(used and used / GIB),
        highlighted(predicted(trial, "memory.device_used_gib")),
    ]


def _serving_row(run: RunData, trial: Trial) -> list[Cell]:
    gain, value, step = _gain(run, trial), cell(run.figure(trial)), trial.measurement
    return [
        Cell(value.text + (" !" if step and step.broken else ""), value.value),
        percent(step.spread_s / step.step_time_s if step and len(step.step_times_s) > 1 else None),
        highlighted(run.predicted(trial)),
        Cell("-") if gain is None else Cell(gain_text(run.objective, gain).split()[0], gain),
        *(cell(served(trial, name)) for name in LATENCIES.values()),
    ]


def _gain(run: RunData, trial: Trial) -> float | None:
    base, own = seconds(run.baseline) if run.baseline else None, seconds(trial)
    compared = (TrialState.MEASURED, TrialState.STOPPED, TrialState.PREDICTED)
    is_compared = trial.fidelity == run.fidelity and trial.state in compared
    return base / own - 1.0 if base and own and is_compared else None


def _details(run: RunData, trial: Trial) -> Collapsed:
    has_run = trial.state is not TrialState.PREDICTED
    limit = trial.time_limit
    facts = [
        (_("State"), Cell(run.state_text(trial))),
        (_("Reason"), cell(trial.reason)),
        (_("Chosen for"), cell(trial.chosen_because)),
        (_("Expected step before the trial, s"), cell(believed(trial, "step_time_s.value"))),
        (_("Expected probability of fitting in memory"), percent(believed(trial, "chance_to_fit"))),
        (_("Time limit"), cell(f"{duration_text(limit.seconds)}: {limit.because}" if limit else None)),
        (_("Shortened steps"), cell(_shortened_text(trial))),
        (_("Log"), cell(trial.log if has_run else None)),
    ]
    blocks: list[Block] = [Facts([(name, value) for name, value in facts if value.text != "-"])]
    if has_run:
        tails = [Code(_("End of {file}", file=name), text) for name, text in run.tails(trial)]
        blocks += tails or [Text(_("Its logs are empty or were deleted."))]
    title = f"{_('Trial')} {run.name(trial)}: {run.state_text(trial)}, {run.configuration(trial)}"
    return Collapsed(f"trial-{trial.number}", title, blocks)


def _shortened_text(trial: Trial) -> str | None:
    if not (shortened := trial.shortened):
        return None
    figures = asdict(shortened) | {name: shown(getattr(shortened, name)) for name in ("whole", "scale", "low", "high")}
    if shortened.nodes:
        return _(
            "{nodes} of {of_nodes} nodes; predicted factor to a step on all: {scale} (80%: {low} to {high})", **figures
        )
    text = N_("{part} of {whole} samples; predicted factor to a whole step: {scale} (80%: {low} to {high})")
    return _(text, part=shortened.global_batch_size, **figures)
