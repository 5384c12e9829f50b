"""Every trial, to be sorted by any column, and the end of its logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagcore.report import serving_text
from flagcore.report.formats import lookup
from flagcore.report.page.blocks import Cell, Code, Facts, Folded, Section, Text, cell, percent, table
from flagcore.report.page.run import RunData, configuration, name_of, number

FIGURES = {
    "step, s": "measured.step_time_s.median",
    "spread, s": "measured.step_time_s.spread",
    "~step, s": "predicted.step_time_s.value",
    "tokens/s/device": "measured.tokens_per_second_per_device",
    "~tokens/s/device": "predicted.tokens_per_second_per_device.value",
    "GiB in use": "measured.device_used_gib",
    "~GiB in use": "predicted.memory.device_used_gib",
}
LATENCIES = ("ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99")


def trials(run: RunData) -> Section:
    """Return a table of all trials, and each of them folded away."""
    every = run.everything
    if not every:
        return Section(anchor="trials", title="Trials", blocks=(Text("No trial has ended."),))
    headings = ["trial", "configuration", "state", *_headings(run), "took, s", "why"]
    rows = [
        [
            Cell(name_of(run, trial), float(trial["number"]), f"#trial-{trial['number']}"),
            configuration(trial),
            trial["state"],
            *_figures(run, trial),
            cell(number(trial["duration_s"]) or None),
            trial["reason"],
        ]
        for trial in every
    ]
    told = [place for place in range(len(headings)) if any(_says(row[place]) for row in rows)]
    whole = table(
        "All trials, probes and repeats included; ~ is predicted",
        [headings[place] for place in told],
        [[row[place] for place in told] for row in rows],
        sortable=True,
    )
    return Section(anchor="trials", title="Trials", blocks=(whole, *(_folded(run, trial) for trial in every)))


def _says(value: Any) -> bool:
    """Return whether there is something in a cell."""
    return value.text != "-" if isinstance(value, Cell) else value not in (None, "")


def _headings(run: RunData) -> list[str]:
    if not run.serves:
        return [*FIGURES, "against the baseline"]
    return [
        run.unit,
        f"~{run.unit}",
        "against the baseline",
        *(f"{serving_text.name_of(name)}, s" for name in LATENCIES),
    ]


def _figures(run: RunData, trial: Mapping[str, Any]) -> list[Cell]:
    base, figure = (run.baseline and _seconds(run.baseline)), _seconds(trial)
    told = base / figure - 1.0 if base and figure and trial["fidelity"] == run.fidelity else None
    if not run.serves:
        figures = [cell(number(lookup(trial, key))) for key in FIGURES.values()]
        return [*figures, percent(told, signed=True)]
    gain = Cell(serving_text.gain_text(run.objective, told).split()[0], told) if told is not None else cell(None)
    known = [number(lookup(trial, f"measured.figures.{name}")) for name in LATENCIES]
    return [cell(run.figure(trial)), cell(run.predicted(trial)), gain, *map(cell, known)]


def _seconds(trial: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step as measured or, where no trial was wanted, as predicted."""
    key = "predicted.step_time_s.value" if trial["state"] == "predicted" else "measured.step_time_s.median"
    return number(lookup(trial, key))


def _folded(run: RunData, trial: Mapping[str, Any]) -> Folded:
    blocks: list[Text | Facts | Code] = [Facts(tuple(_facts(run, trial)))]
    tails = run.tails(trial) if trial["state"] != "predicted" else []
    blocks += [Code(f"End of {name}", text) for name, text in tails]
    if not tails and trial["state"] != "predicted":
        blocks.append(Text("Its logs are empty, or are not there any more."))
    title = f"Trial {name_of(run, trial)}: {trial['state']}, {configuration(trial)}"
    return Folded(anchor=f"trial-{trial['number']}", title=title, blocks=tuple(blocks))


def _facts(run: RunData, trial: Mapping[str, Any]) -> list[tuple[str, Cell]]:
    facts = [("State", Cell(str(trial["state"])))]
    if trial["reason"]:
        facts.append(("Reason", Cell(str(trial["reason"]))))
    because = trial["predicted"].get("chosen_because")
    if because:
        facts.append(("Chosen because", Cell(str(because))))
    believed = trial["predicted"].get("believed") or {}
    if lookup(believed, "step_time_s.value") is not None:
        step = believed["step_time_s"]
        facts.append(("Believed step before it ran, s", cell(float(step["value"]))))
    if believed.get("chance_to_fit") is not None:
        facts.append(("Chance to fit, as believed", percent(float(believed["chance_to_fit"]))))
    if trial["log"] and trial["state"] != "predicted":
        facts.append(("Log", Cell(str(trial["log"]))))
    return facts
