"""Assembles the sections of the page of a run, including environment and chip facts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import starmap
from pathlib import Path
from typing import Any

from flagcore.domain.metrics import load_text
from flagcore.domain.trial import ESTIMATE
from flagcore.i18n import N_, _, ngettext
from flagcore.report.blocks import Cell, Facts, Text, table
from flagcore.report.formats import NAMES, shown, size_text
from flagcore.report.run import RunData
from flagcore.report.summary import answer, details, ending
from flagcore.report.text import duration_text, limits_text
from flagcore.spec.plain_data import lookup
from flagcore_page.blocks import Block, Code, Collapsed, Page, Section, render
from flagcore_page.resources import improvements, measured_points, memory, pipeline, serving, step_time
from flagcore_page.search import accuracy, funnel, progress, trials
from flagcore_page.start import commands, configurations, text_of

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
