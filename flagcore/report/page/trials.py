"""A sortable table of every trial, and the end of its logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.i18n import N_, _
from flagcore.report import serving_text
from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Cell, Code, Collapsed, Facts, Section, Text, cell, percent, table
from flagcore.report.page.run import RunData, configuration, name_of, number
from flagcore.report.text import state_name

FIGURES = {
    N_("step, s"): "measured.step_time_s.median",
    N_("spread, s"): "measured.step_time_s.spread",
    N_("~step, s"): "predicted.step_time_s.value",
    "tokens/s/device": "measured.tokens_per_second_per_device",
    "~tokens/s/device": "predicted.tokens_per_second_per_device.value",
    N_("in use, GiB"): "measured.device_used_gib",
    N_("~in use, GiB"): "predicted.memory.device_used_gib",
}
LATENCIES = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99")


def trials(run: RunData) -> Section:
    """Return a table of all trials, and the details of each."""
    every = run.all_trials
    if not every:
        return Section(anchor="trials", title=_("Trials"), blocks=(Text(_("No trial has finished.")),))
    headings = [_("trial"), _("configuration"), _("state"), *_headings(run), _("duration, s"), _("reason")]
    rows = [
        [
            Cell(name_of(run, trial), float(trial["number"]), f"#trial-{trial['number']}"),
            configuration(run, trial),
            state_name(trial["state"]),
            *_figures(run, trial),
            cell(number(trial["duration_s"]) or None),
            trial["reason"],
        ]
        for trial in every
    ]
    used = [place for place in range(len(headings)) if any(_is_filled(row[place]) for row in rows)]
    whole = table(
        _("All trials, probes and repeats; ~ is predicted"),
        [headings[place] for place in used],
        [[row[place] for place in used] for row in rows],
        sortable=True,
    )
    return Section(anchor="trials", title=_("Trials"), blocks=(whole, *(_details(run, trial) for trial in every)))


def _is_filled(value: Any) -> bool:
    return value.text != "-" if isinstance(value, Cell) else value not in (None, "")


def _headings(run: RunData) -> list[str]:
    if not run.serves:
        return [*map(_, FIGURES), _("vs baseline")]
    return [
        run.unit,
        f"~{run.unit}",
        _("vs baseline"),
        *(f"{serving_text.name_of(name)}, s" for name in LATENCIES),
    ]


def _figures(run: RunData, trial: Mapping[str, Any]) -> list[Cell]:
    base, figure = (run.baseline and _seconds(run.baseline)), _seconds(trial)
    gain = base / figure - 1.0 if base and figure and trial["fidelity"] == run.fidelity else None
    if not run.serves:
        figures = [cell(number(lookup(trial, key))) for key in FIGURES.values()]
        return [*figures, percent(gain, signed=True)]
    change = Cell(serving_text.gain_text(run.objective, gain).split()[0], gain) if gain is not None else cell(None)
    latencies = [number(lookup(trial, f"measured.figures.{name}")) for name in LATENCIES]
    return [cell(run.figure(trial)), cell(run.predicted(trial)), change, *map(cell, latencies)]


def _seconds(trial: Mapping[str, Any]) -> float | None:
    """Return the measured step time, of an estimate the predicted one."""
    key = "predicted.step_time_s.value" if trial["state"] == "predicted" else "measured.step_time_s.median"
    return number(lookup(trial, key))


def _details(run: RunData, trial: Mapping[str, Any]) -> Collapsed:
    blocks: list[Text | Facts | Code] = [Facts(tuple(_facts(run, trial)))]
    tails = run.tails(trial) if trial["state"] != "predicted" else []
    blocks += [Code(_("End of {file}", file=name), text) for name, text in tails]
    if not tails and trial["state"] != "predicted":
        blocks.append(Text(_("Its logs are empty or were deleted.")))
    title = f"{_('Trial')} {name_of(run, trial)}: {state_name(trial['state'])}, {configuration(run, trial)}"
    return Collapsed(anchor=f"trial-{trial['number']}", title=title, blocks=tuple(blocks))


def _facts(run: RunData, trial: Mapping[str, Any]) -> list[tuple[str, Cell]]:
    facts = [(_("State"), Cell(state_name(trial["state"])))]
    if trial["reason"]:
        facts.append((_("Reason"), Cell(str(trial["reason"]))))
    because = trial["predicted"].get("chosen_because")
    if because:
        facts.append((_("Chosen for"), Cell(str(because))))
    believed = trial["predicted"].get("believed") or {}
    if lookup(believed, "step_time_s.value") is not None:
        step = believed["step_time_s"]
        facts.append((_("Expected step before the trial, s"), cell(float(step["value"]))))
    if believed.get("chance_to_fit") is not None:
        facts.append((_("Expected probability to fit"), percent(float(believed["chance_to_fit"]))))
    if trial["log"] and trial["state"] != "predicted":
        facts.append((_("Log"), Cell(str(trial["log"]))))
    return facts
