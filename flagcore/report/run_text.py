"""The result of a run as plain text, and the tables in it that the page of a run has, too."""

from flagcore.domain.metrics import gain, load_text
from flagcore.domain.plan import failed_repeats
from flagcore.domain.records import GIB
from flagcore.domain.trial import ESTIMATE, Role, Trial, TrialState
from flagcore.i18n import _, ngettext
from flagcore.report.blocks import Cell, Table, Text, cell, percent, plain_table, plain_text, table
from flagcore.report.formats import NAMES, table_columns
from flagcore.report.run import RunData, seconds, served
from flagcore.report.summary import answer, details, ending
from flagcore.report.text import funnel, gain_text, heading, reason_text, repeats_text


def trial_table(run: RunData, *, whole: bool = False) -> Table:
    """Return a table with one row per trial. With `whole`, it also has durations and reasons, but no empty columns."""
    if run.serves:
        figures = [run.unit, _("spread"), f"~{run.unit}", _("median"), _("vs base"), *_latencies(run)]
    else:
        figures = [_("step s"), _("spread"), _("~step s"), "tok/s/dev", _("median"), _("vs base"), "GiB", "~GiB"]
    figures = [*([_("reason")] * whole), *figures, *([_("duration s")] * whole)]
    headings = [_(NAMES["row"][run.fidelity]), _("configuration"), _("state"), *figures]
    rows, listed = [], run.listed
    for trial in (each for each in run.all_trials if each.number in listed):
        row = [run.cell(trial), Cell(run.configuration(trial)), Cell(run.state_text(trial))]
        row += [cell(reason_text(trial.reason) or None)] * whole
        row += _serving_row(run, trial) if run.serves else _training_row(run, trial)
        rows.append(row + [cell(trial.duration_s or None)] * whole)
    used = [place for place in range(len(headings)) if not whole or any(row[place].text != "-" for row in rows)]
    return table(
        _("All candidates") if run.fidelity == ESTIMATE else _("All trials, probes and repeats; ~ is predicted"),
        [headings[place] for place in used],
        [[row[place] for place in used] for row in rows],
        sortable=True,
    )


def _training_row(run: RunData, trial: Trial) -> list[Cell]:
    measured, is_predicted = trial.measurement, trial.state is TrialState.PREDICTED
    predicted, figures = trial.predicted, run.predicted(trial)
    mark = "~" if is_predicted or (measured and measured.modelled_s is not None) else ""
    speed = figures and figures[0] if is_predicted else run.figure(trial)
    used = (measured.device_used_bytes or measured.peak_reserved_bytes) if measured else None
    return [
        cell(measured.step_time_s if measured else None, mark),
        cell(measured.spread_s if measured else None),
        cell(trial.predicted_step_s, "~"),
        cell(speed, mark),
        cell(_median(run, trial), mark),
        percent(_gain(run, trial), mark, signed=True),
        cell(used and used / GIB),
        cell(predicted.device_used_bytes / GIB if predicted else None, "~"),
    ]


def _serving_row(run: RunData, trial: Trial) -> list[Cell]:
    over, value, step = _gain(run, trial), cell(run.figure(trial)), trial.measurement
    predicted, mark = run.predicted(trial), "~" if trial.state is TrialState.PREDICTED else ""
    return [
        Cell(value.text + (" !" if step and step.broken else ""), value.value),
        percent(step.spread_s / step.step_time_s if step and len(step.step_times_s) > 1 else None),
        cell(predicted[0] if predicted else None, "~"),
        cell(_median(run, trial)),
        Cell("-") if over is None else Cell(mark + gain_text(run.objective, over).split()[0], over),
        *(cell(served(trial, name)) for name in _latencies(run).values()),
    ]


def _latencies(run: RunData) -> dict[str, str]:
    """Return the headings and the names of the latencies in tables: the usual ones, and those that have limits."""
    return table_columns("latencies") | {heading(name): name for name in run.limits}


def _median(run: RunData, trial: Trial) -> float | None:
    """Return the median objective of a candidate, in the row of its first trial. None in the rows of its repeats."""
    is_first = trial.role is not Role.REPEAT and trial.state is not TrialState.PREDICTED
    figures = run.figures(trial) if is_first and trial.fidelity == run.fidelity else None
    return figures[0] if figures else None


def _gain(run: RunData, trial: Trial) -> float | None:
    """Return the gain of a candidate's median over the baseline or, if it was stopped early, the highest possible."""
    baseline = run.baseline if run.speedup or run.fidelity != ESTIMATE else None
    base, own = run.median_s(baseline) if baseline else None, run.median_s(trial) or seconds(trial)
    compared = (TrialState.MEASURED, TrialState.STOPPED, TrialState.PREDICTED)
    is_compared = trial.fidelity == run.fidelity and trial.state in compared
    is_compared &= trial.role not in (Role.REPEAT, Role.BASELINE)
    if baseline is None or not base or not own or not is_compared:
        return None
    return gain(run.objective, base, own, run.figures_of(baseline), run.figures_of(trial))


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


def front_table(run: RunData) -> Table | None:
    """Return the table of the Pareto front of throughput and latency, or None if there is only one load point."""
    if not any(trial.measurement and len(trial.measurement.points) > 1 for trial in run.trials):
        return None
    columns = table_columns("front")
    figures = ([cell(point.get(key)) for key in columns.values()] for point in run.front)
    rows = [[str(point["trial"]), load_text(point), *cells] for point, cells in zip(run.front, figures, strict=True)]
    return table(_("Pareto front of throughput and latency"), [_("trial"), _("load"), *columns], rows)


def result_text(run: RunData) -> str:
    """Return a result as text."""
    parts = [text for block in (*answer(run), *details(run)) for text in plain_text(block)]
    if run.all_trials:
        failed_trials = [trial for trial in run.all_trials if trial.reason and trial.state is not TrialState.STOPPED]
        texts = [
            _("trial {number}: {reason}", number=trial.number, reason=reason_text(trial.reason))
            for trial in failed_trials
        ]
        parts.append("\n".join([plain_table(trial_table(run)), *(texts if run.best else [])]))
    parts += [text for block in (front_table(run), learning(run)) for text in plain_text(block)]
    parts.append("\n".join([funnel(run.counts, run.fidelity), *repeats_text(failed_repeats(run.repeats))]))
    return "\n\n".join([*parts, *(each.text for each in ending(run))])
