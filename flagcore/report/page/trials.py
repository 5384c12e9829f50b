"""A sortable table of all trials, and the ends of their logs."""

from __future__ import annotations

from flagcore.i18n import _
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
from flagcore.report.page.run import RunData, configuration, listed, name_of, trial_cell
from flagcore.report.result import TrialResult, number
from flagcore.report.text import duration_text, gain_text, state_name

LATENCIES = {"TTFT p50 s": "ttft_s.p50", "TTFT p99 s": "ttft_s.p99", "TPOT p50 s": "tpot_s.p50"}


def trials(run: RunData) -> Section:
    """Return a table of all trials, and the details of each."""
    shown_numbers = listed(run)
    details = tuple(_details(run, trial) for trial in run.all_trials if trial.number in shown_numbers)
    folded = Collapsed(anchor="logs", title=_("Details and logs of each trial"), blocks=details)
    blocks: list[Block] = [trial_table(run, whole=True), folded]
    if len(shown_numbers) < len(run.all_trials):
        text = _(
            "Tables list {count} of {total:,} trials: the fastest, and the first that failed. result.json has all.",
            count=len(shown_numbers),
            total=len(run.all_trials),
        )
        blocks.insert(0, Text(text))
    no_trial = Text(_("No trial has finished."))
    return Section(anchor="trials", title=_("Trials"), blocks=tuple(blocks) if run.all_trials else (no_trial,))


def trial_table(run: RunData, *, whole: bool = False) -> Table:
    """Return a table with one row per trial; the `whole` table has durations and reasons, and omits empty columns."""
    if run.serves:
        figures = [run.unit, _("spread"), f"~{run.unit}", _("vs base"), *LATENCIES]
    else:
        figures = [_("step s"), _("spread"), _("~step s"), "tok/s/dev", _("vs base"), "GiB", "~GiB"]
    headings = [_("trial"), _("configuration"), _("state"), *figures, *([_("duration s"), _("reason")] * whole)]
    rows, shown_numbers = [], listed(run)
    for trial in (each for each in run.all_trials if each.number in shown_numbers):
        state_text = state_name(trial.state, trial.fidelity)
        row = [trial_cell(run, trial), Cell(configuration(run, trial)), Cell(state_text)]
        row += _serving_row(run, trial) if run.serves else _training_row(run, trial)
        rows.append(row + [cell(number(trial.duration_s) or None), cell(trial.reason)] * whole)
    used = [place for place in range(len(headings)) if not whole or any(row[place].text != "-" for row in rows)]
    return table(
        _("All trials, probes and repeats; ~ is predicted"),
        [headings[place] for place in used],
        [[row[place] for place in used] for row in rows],
        sortable=True,
    )


def _training_row(run: RunData, trial: TrialResult) -> list[Cell]:
    measured, predicted = trial.measured, trial.predicted
    step, speed = (measured.step_time_s, measured.tokens_per_second_per_device) if measured else (None, None)
    mark = "~" if trial.state == "predicted" or (step and step.modelled is not None) else ""
    if trial.state == "predicted":
        speed = predicted.figure("tokens_per_second_per_device.value")
    used = (measured.peak_reserved_gib, measured.device_used_gib) if measured else (None, None)
    return [
        highlighted(step.median if step else None, mark),
        cell(step.spread if step else None),
        highlighted(predicted.step_s),
        highlighted(speed, mark),
        percent(_gain(run, trial), mark, signed=True),
        cell(used[0] if used[1] is None else used[1]),
        highlighted(predicted.figure("memory.device_used_gib")),
    ]


def _serving_row(run: RunData, trial: TrialResult) -> list[Cell]:
    gain, value = _gain(run, trial), cell(run.figure(trial))
    step = trial.measured.step_time_s if trial.measured else None
    spread = step.spread / step.median if step and step.n > 1 else None
    mark = " !" if trial.broken else ""
    return [
        Cell(value.text + mark, value.value),
        percent(spread),
        highlighted(run.predicted(trial)),
        Cell("-") if gain is None else Cell(gain_text(run.objective, gain).split()[0], gain),
        *(cell(trial.figure(name)) for name in LATENCIES.values()),
    ]


def _gain(run: RunData, trial: TrialResult) -> float | None:
    base, seconds = run.baseline and run.baseline.seconds, trial.seconds
    compared = trial.fidelity == run.fidelity and trial.state in ("measured", "stopped", "predicted")
    return base / seconds - 1.0 if base and seconds and compared else None


def _details(run: RunData, trial: TrialResult) -> Collapsed:
    blocks: list[Text | Facts | Code] = [Facts(tuple(_facts(trial)))]
    tails = run.tails(trial) if trial.state != "predicted" else []
    blocks += [Code(_("End of {file}", file=name), text) for name, text in tails]
    if not tails and trial.state != "predicted":
        blocks.append(Text(_("Its logs are empty or were deleted.")))
    state_text = state_name(trial.state, trial.fidelity)
    title = f"{_('Trial')} {name_of(run, trial)}: {state_text}, {configuration(run, trial)}"
    return Collapsed(anchor=f"trial-{trial.number}", title=title, blocks=tuple(blocks))


def _facts(trial: TrialResult) -> list[tuple[str, Cell]]:
    has_run = trial.state != "predicted"
    facts = [
        (_("State"), Cell(state_name(trial.state, trial.fidelity))),
        (_("Reason"), cell(trial.reason)),
        (_("Chosen for"), cell(trial.predicted.chosen_because)),
        (_("Expected step before the trial, s"), cell(trial.predicted.figure("believed.step_time_s.value"))),
        (_("Expected probability to fit"), percent(trial.predicted.figure("believed.chance_to_fit"))),
        (_("Time limit"), cell(_limit(trial))),
        (_("Shortened steps"), cell(_shortened_text(trial))),
        (_("Log"), cell(trial.log if has_run else None)),
    ]
    return [(name, value) for name, value in facts if value.text != "-"]


def _limit(trial: TrialResult) -> str | None:
    limit = trial.time_limit
    return None if limit is None else f"{duration_text(limit['seconds'])}: {limit['because']}"


def _shortened_text(trial: TrialResult) -> str | None:
    shortened = trial.shortened
    if shortened and shortened.get("nodes"):
        return _(
            "{nodes} of {of_nodes} nodes; predicted factor to a step on all: {scale} (80%: {low} to {high})",
            nodes=shortened["nodes"],
            of_nodes=shortened["of_nodes"],
            **{name: shown(shortened[name]) for name in ("scale", "low", "high")},
        )
    if not shortened:
        return None
    return _(
        "{part} of {whole} samples; predicted factor to a whole step: {scale} (80%: {low} to {high})",
        part=shortened["global_batch_size"],
        **{name: shown(shortened[name]) for name in ("whole", "scale", "low", "high")},
    )
