"""Assembles the sections of a report page, including environment and chip facts, and formats a result as plain text."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from flagcore.domain.plan import failed_repeats
from flagcore.domain.trial import TrialState
from flagcore.i18n import N_, _, ngettext
from flagcore.report.formats import NAMES, shown, size_text
from flagcore.report.page.blocks import (
    Block,
    Cell,
    Chart,
    Code,
    Collapsed,
    Facts,
    Page,
    Section,
    Text,
    plain_table,
    plain_text,
    table,
)
from flagcore.report.page.resources import front_table, improvements, memory, pipeline, serving, step_time
from flagcore.report.page.run import RunData
from flagcore.report.page.search import accuracy, funnel, learning, progress, trial_table, trials
from flagcore.report.page.summary import ending, summary
from flagcore.report.text import funnel as funnel_text
from flagcore.report.text import repeats_text


def page(run: RunData) -> Page:
    """Return the page of a run. Empty sections are left out."""
    resources = (step_time, memory, pipeline)
    sections = (summary, serving, trials, funnel, improvements, *resources, progress, accuracy, environment, chips)
    title = N_("Serving on {hardware}: {run}") if run.serves else N_("Training on {hardware}: {run}")
    return Page(
        title=_(title, hardware=run.hardware, run=run.folder.resolve().name),
        subtitle=ngettext(
            "{count} candidate, {how}; objective: {objective}",
            "{count} candidates, {how}; objective: {objective}",
            len(run.trials),
            how=_("not measured") if run.is_unmeasured else _(NAMES["trials_made"][run.fidelity]),
            objective=run.unit,
        ),
        sections=tuple(section for make in sections if (section := make(run)) is not None),
    )


def result_text(run: RunData) -> str:
    """Return a result as text."""
    last = ending(run)
    blocks = [block for block in summary(run).blocks if block not in last and not isinstance(block, Chart)]
    parts = [text for block in blocks for text in plain_text(block)]
    if run.all_trials:
        failed_trials = [trial for trial in run.all_trials if trial.reason and trial.state is not TrialState.STOPPED]
        texts = [_("trial {number}: {reason}", number=trial.number, reason=trial.reason) for trial in failed_trials]
        parts.append("\n".join([plain_table(trial_table(run)), *(texts if run.best else [])]))
    parts += [text for block in (front_table(run), learning(run)) for text in plain_text(block)]
    parts.append("\n".join([funnel_text(run.counts, run.fidelity), *repeats_text(failed_repeats(run.repeats))]))
    return "\n\n".join([*parts, *(each.text for each in last)])


UNITS = {"bytes": (2**30, "GiB"), "bytes/s": (1e9, "GB/s"), "flops/s": (1e12, "TFLOP/s")}


def environment(run: RunData) -> Section:
    """Return the section with versions, environment variables and the spec."""
    trial = next((each for each in [run.best, *run.all_trials] if each and each.measurement), None)
    measured = trial.measurement if trial else None
    facts = [(_("Hardware"), Cell(run.hardware)), (_("flagcore of this page"), Cell(version("flagcore")))]
    facts += [(str(name), Cell(str(version))) for name, version in (measured.versions if measured else {}).items()]
    blocks: list[Block] = [Facts([each for each in facts if each[1].text])]
    if variables := run.insight.get("environment"):
        rows: list[list[Any]] = [[str(name), str(value)] for name, value in variables.items()]
        blocks.append(table(_("Environment variables set by plugins"), [_("variable"), _("value")], rows))
    if trial and measured and measured.telemetry:
        rows = [[str(name), float(value)] for name, value in measured.telemetry.items()]
        blocks.append(table(_("Telemetry of trial {number}", number=trial.number), [_("metric"), _("value")], rows))
    if trial and measured and measured.effective:
        rows = [[str(name), str(value)] for name, value in measured.effective.items()]
        caption = _("Effective values reported by the engine, trial {number}", number=trial.number)
        blocks.append(table(caption, [_("name"), _("value")], rows))
    if spec := run.text_of(run.folder / "spec.yaml"):
        title = _("Spec (spec.yaml)")
        blocks.append(Collapsed("spec", title, (Code(title, spec.rstrip()),)))
    return Section("environment", _("Environment"), blocks)


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
            blocks.append(Text(str(chip["notes"])))
    return Section("chips", _("Chips"), blocks or (Text(_("This run has no facts about the chip.")),))


PEAK = NAMES["facts"]["peak"]


def _fact(fact: Mapping[str, Any]) -> list[Any]:
    unit, name = UNITS[fact["unit"]]
    value, fact_name, kind = float(fact["value"]), _(fact["fact"]), fact["kind"]
    if fact["fact"].startswith(PEAK):
        fact_name = _(PEAK) + fact["fact"].removeprefix(PEAK)
    return [fact_name, Cell(f"{shown(value / unit)} {name}", value), _(kind), fact["from"]]
