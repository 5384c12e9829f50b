"""The bottleneck of the best configuration, and changes that reduce it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flagcore.domain.trial import Trial
from flagcore.i18n import _
from flagcore.report.explanation import part_name
from flagcore.report.formats import lookup, shown, size_text
from flagcore.report.page.blocks import Block, Section, Text, cell, percent, size, table
from flagcore.report.page.run import Record, RunData, memory_of, predicted, predicted_s, time_parts
from flagcore.report.result import number
from flagcore.report.text import knob_of, value_text, values_text

MAX_CHANGES = 8
"""Maximum number of listed changes."""
STEP = "step_time_s.value"


def improvements(run: RunData) -> Section | None:
    """Return the bottleneck of the best and changes that reduce it; None without a best or a predicted time."""
    if run.best is None or predicted_s(run.best) is None:
        return None
    blocks: list[Block] = [Text(_bottleneck(run, run.best))]
    if knobs := run.insight.get("knobs") or []:
        blocks += [_changes(run, run.best, knobs), *_sensitivity(run, knobs)]
    return Section("improvements", _("Bottleneck"), blocks)


def _limiting_part(best: Trial) -> str:
    """Return the part of the predicted time that is the bottleneck; empty if it is the memory, or unknown."""
    limit = lookup(best.predicted, "limit")
    return next((part for part in time_parts(best) if part_name(part) == limit), "")


def _bottleneck(run: RunData, best: Trial) -> str:
    memory, step, part = memory_of(best), predicted_s(best) or 0.0, _limiting_part(best)
    if lookup(best.predicted, "limit") == "memory":
        return _(
            "Bottleneck: memory, ~{used} of {capacity} in use (predicted).",
            used=size_text(memory["device_used_gib"]),
            capacity=size_text(memory["capacity_gib"]),
        )
    if not part:
        return _("Predicted: {value} {unit}.", value=shown(run.predicted(best)), unit=run.unit)
    figure = time_parts(best)[part]
    return _(
        "Bottleneck: {limit}, ~{seconds} s of a step of ~{step} s, or {share:.1%} (predicted).",
        limit=_(part_name(part)),
        seconds=shown(figure),
        step=shown(step),
        share=figure / step,
    )


def _changes(run: RunData, best: Trial, knobs: Sequence[Record]) -> Block:
    """Return the faster candidates that reduce the bottleneck and differ from the best in one knob."""
    is_memory, part = lookup(best.predicted, "limit") == "memory", _limiting_part(best)
    key = "memory.device_used_gib" if is_memory else f"time.{part}" if part else STEP
    step, own = (predicted(best, name) or 0.0 for name in (STEP, key))
    nearest = {
        _key(value["nearest"]["candidate"]): value["nearest"]
        for knob in knobs
        for value in knob["values"]
        if value["value"] != knob["best"]
    }
    faster = [
        (lookup(each["predicted"], STEP), number(lookup(each["predicted"], key)), each)
        for each in nearest.values()
        if _changes_one_knob(each, run)
    ]
    faster = sorted((each for each in faster if each[0] < step and (each[1] or own) < own), key=lambda each: each[:2])
    if not faster:
        return Text(_("Changes of one knob that help: none. No such change is predicted to be faster and to fit."))
    trials = {_key(trial.candidate.as_dict()): trial for trial in run.trials}
    untried = [each for each in faster if _key(each[2]["candidate"]) not in trials]
    if not untried:
        ran = ", ".join(f"{_('trial')} {trials[_key(each['candidate'])].number}" for *_figures, each in faster)
        return Text(_("Changes of one knob that help: none. Those predicted to be faster ran: {trials}.", trials=ran))
    rows = []
    for seconds, figure, each in untried[:MAX_CHANGES]:
        changed = [f"{knob_of(knob, run.knobs).title} {value_text(value)}" for knob, value in each["differs"].items()]
        time = lookup(each["predicted"], "objective.value") if run.serves else seconds
        used = size(number(lookup(each["predicted"], "memory.device_used_gib")))
        over = percent(seconds / step - 1.0, signed=True)
        rows.append([", ".join(changed), *([cell(figure)] if part else []), cell(time), over, used])
    own_heading = [f"~{_(part_name(part))}, s"] if part else []
    seconds_heading = f"~{run.unit}" if run.serves else _("~step s")
    return table(
        _("Untried changes of one knob that are predicted to be faster"),
        [_("change"), *own_heading, seconds_heading, _("~time vs best"), _("~in use")],
        rows,
        sortable=True,
    )


def _changes_one_knob(change: Record, run: RunData) -> bool:
    """Return whether a candidate differs in one knob only, or also in knobs that detail this knob."""
    changed_knobs = change["differs"]
    return sum(knob_of(knob, run.knobs).part_of not in changed_knobs for knob in changed_knobs) == 1


def _key(candidate: Record) -> str:
    return repr(sorted(candidate.items()))


def _sensitivity(run: RunData, knobs: Sequence[Record]) -> Iterator[Block]:
    """Yield, for each value of each knob, the slowdown of the fastest predicted candidate with this value."""
    fastest_s = min(_seconds(value) for knob in knobs for value in knob["values"])
    slowdowns = [(max(map(_seconds, knob["values"])) / fastest_s - 1.0, knob) for knob in knobs]
    slowdowns.sort(key=lambda pair: -pair[0])
    names = [knob_of(str(knob["knob"]), run.knobs).title for _slower, knob in slowdowns]
    rows = list[list[Any]]()
    for (_slower, knob), name in zip(slowdowns, names, strict=True):
        for value in knob["values"]:
            figure = lookup(value, "fastest.predicted.objective.value") if run.serves else _seconds(value)
            row: list[Any] = [name, value_text(value["value"]), _("yes") if value["value"] == knob["best"] else ""]
            row += [percent(_seconds(value) / fastest_s - 1.0, signed=True), cell(figure), cell(value["candidates"])]
            rows.append([*row, values_text(value["fastest"]["candidate"], run.knobs)])
    text = _(
        "{knob} has the largest influence: its worst value makes the fastest candidate {share:.1%} slower. Other "
        "knobs are re-optimized for each value.",
        knob=names[0],
        share=slowdowns[0][0],
    )
    yield Text(text)
    figure_heading = f"~{run.unit}" if run.serves else _("~step s")
    headings = [_("knob"), _("value"), _("best"), _("~slower by"), figure_heading, _("candidates that fit")]
    caption = _("The fastest predicted candidate with each value, compared to the fastest of all")
    yield table(caption, [*headings, _("fastest")], rows, sortable=True)


def _seconds(value: Record) -> float:
    return float(lookup(value, "fastest.predicted.step_time_s.value"))
